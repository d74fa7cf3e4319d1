"""A checkpoint's files, written: a rank's pieces of tensors in, a whole folder or none out.

Each rank writes one safetensors file, as torch's distributed checkpoint has it (the offsets of
every piece in the header), so that its reader reads it. Which rank writes what follows from the
layout alone: nothing is sent between ranks, and so this may run in a thread beside training.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import (
    compute_local_shape_and_global_offset,
)

from diptych.core.hashing import canonical_json, xxh3_bytes

_CHUNK_BYTES = 1 << 24
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
STATE_FILE = "state.json"
CHECKSUM_FILE = "checksums.json"
_HIDDEN = "."


@dataclass(frozen=True)
class Piece:
    """What this rank writes of a tensor.

    Attributes:
        name: of the whole tensor.
        local: the piece, on any device; live, or a copy.
        offsets: where it begins in the whole, one number a dimension.
    """

    name: str
    local: torch.Tensor
    offsets: tuple[int, ...]


def pieces_of(tensors: Mapping[str, torch.Tensor], *, rank: int, world_size: int) -> list[Piece]:
    """Say which pieces a rank writes, so that the ranks' pieces make up every tensor just once.

    Args:
        tensors: By name, the same names on every rank; DTensors over all ranks, or tensors that
            every rank holds alike.
        rank: This rank's number.
        world_size: How many there are.
    """
    loads = [0] * world_size
    pieces: list[Piece] = []
    for number, (name, tensor) in enumerate(tensors.items()):
        tensor = tensor.detach()
        if isinstance(tensor, DTensor):
            if _is_owner(tensor, number=number):
                pieces += _piece_of(name, tensor=tensor)
            continue
        # The rank that has least to write so far: all ranks count alike.
        owner = loads.index(min(loads))
        loads[owner] += tensor.nbytes
        if owner == rank:
            pieces.append(Piece(name, tensor, (0,) * tensor.ndim))
    return pieces


def _is_owner(tensor: DTensor, *, number: int) -> bool:
    """Whether this rank's copy is the one that is written: the copies take turns."""
    mesh = tensor.device_mesh
    place = mesh.get_coordinate()
    assert place is not None, "every rank is in the mesh"
    return all(
        place[axis] == number % mesh.size(axis)
        for axis, placement in enumerate(tensor.placements)
        if isinstance(placement, Replicate)
    )


def _piece_of(name: str, *, tensor: DTensor) -> list[Piece]:
    _, offsets = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    local = tensor.to_local()
    # A rank may have no row of a small tensor.
    return [Piece(name, local, tuple(offsets))] if local.numel() else []


class Staging:
    """The host's memory that a state is copied to, kept from one save to the next."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def copy(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Copy pieces; what is copied stays as it is until the next call."""
        on_device = any(piece.local.is_cuda for piece in pieces)
        copies = [
            replace(piece, local=self._buffer(piece, pinned=on_device).copy_(piece.local, True))
            for piece in pieces
        ]
        if on_device:
            torch.cuda.synchronize()
        return copies

    def num_new_bytes(self, pieces: Sequence[Piece]) -> int:
        """Count the bytes that a copy of these would take beyond what is held."""
        new = (piece.local.nbytes for piece in pieces if not self._fits(piece))
        return sum(new)

    def _fits(self, piece: Piece) -> bool:
        buffer = self._buffers.get(piece.name)
        return buffer is not None and buffer.shape == piece.local.shape

    def _buffer(self, piece: Piece, *, pinned: bool) -> torch.Tensor:
        if not self._fits(piece):
            self._buffers[piece.name] = torch.empty(
                piece.local.shape, dtype=piece.local.dtype, pin_memory=pinned
            )
        return self._buffers[piece.name]


def partial_folder(folder: Path, *, number: int) -> Path:
    """Name the folder that becomes a checkpoint; two saves never write one."""
    return folder.with_name(f"{_HIDDEN}{folder.name}.partial-{number}")


def write_part(partial: Path, *, pieces: Sequence[Piece], rank: int, world_size: int) -> None:
    """Write this rank's file, and beside it its checksum; both are on the disk when it returns.

    Raises:
        OSError: no room, or the disk fails.
    """
    os.makedirs(partial, exist_ok=True)
    name = f"shard-{rank + 1:05d}-of-{world_size:05d}.safetensors"
    sums = {name: _write_tensors(partial / name, pieces=pieces)} if pieces else {}
    _write_file(_sums_file(partial, rank=rank), data=canonical_json(sums).encode())


def seal(
    partial: Path,
    *,
    folder: Path,
    state: Mapping[str, Any],
    logs: Mapping[str, bytes],
    world_size: int,
) -> None:
    """Give a folder that has every rank's file its state, its checksums and its name.

    Args:
        partial: What the ranks wrote into.
        folder: Its name as a checkpoint; one of that name that is there gives way.
        state: What is not a tensor.
        logs: Files to keep beside it, by name.
        world_size: How many ranks wrote.

    Raises:
        OSError: no room, or the disk fails; `folder` is then as it was.
    """
    sums: dict[str, str] = {}
    for rank in range(world_size):
        part = _sums_file(partial, rank=rank)
        sums.update(json.loads(part.read_text(encoding="utf-8")))
        os.unlink(part)
    texts = {STATE_FILE: (canonical_json(state) + "\n").encode(), **logs}
    for name, data in texts.items():
        _write_file(partial / name, data=data)
        sums[name] = xxh3_bytes(data)
    _write_file(partial / CHECKSUM_FILE, data=(canonical_json(sums) + "\n").encode())
    _sync_folder(partial)
    discard(folder)
    os.rename(partial, folder)
    _sync_folder(folder.parent)


def discard(folder: Path) -> None:
    """Remove a folder: first its name, so that a half of it is never taken for the whole."""
    if folder.is_symlink():
        folder.unlink()  # what it leads to is not ours to remove
        return
    if not folder.exists():
        return
    doomed = folder
    if not folder.name.startswith(_HIDDEN):
        doomed = folder.with_name(f"{_HIDDEN}{folder.name}.partial-old")
        shutil.rmtree(doomed, ignore_errors=True)
        os.rename(folder, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def discard_partial(parent: Path) -> None:
    """Remove what saves that were cut off have left."""
    for path in parent.glob(f"{_HIDDEN}*.partial*"):
        shutil.rmtree(path, ignore_errors=True)


def _sums_file(partial: Path, *, rank: int) -> Path:
    return partial / f".sums-{rank}.json"


def _write_tensors(path: Path, *, pieces: Sequence[Piece]) -> str:
    """Write a safetensors file; return the xxh3 of its bytes."""
    digest = xxhash.xxh3_128()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        for chunk in _bytes_of(pieces):
            digest.update(chunk)
            _write_all(descriptor, data=chunk)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return digest.hexdigest()


def _bytes_of(pieces: Sequence[Piece]) -> Iterator[memoryview]:
    yield memoryview(_header(pieces))
    for piece in pieces:
        local = piece.local.to("cpu").contiguous().flatten()
        data = memoryview(local.view(torch.uint8).numpy())  # pyright: ignore[reportArgumentType]
        for start in range(0, len(data), _CHUNK_BYTES):
            yield data[start : start + _CHUNK_BYTES]


def _header(pieces: Sequence[Piece]) -> bytes:
    """Return the header of a safetensors file with what torch's distributed checkpoint adds."""
    offsets = {piece.name: {"saved_offsets": list(piece.offsets)} for piece in pieces}
    header: dict[str, Any] = {
        "__metadata__": {
            "format": "pt",
            "DCP_VERSION": "1.0",
            "DCP_SHARDING_INFO": json.dumps(offsets),
        }
    }
    start = 0
    for piece in pieces:
        header[piece.name] = {
            "dtype": _DTYPES[piece.local.dtype],
            "shape": list(piece.local.shape),
            "data_offsets": [start, start + piece.local.nbytes],
        }
        start += piece.local.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write_file(path: Path, *, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        _write_all(descriptor, data=memoryview(data))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_all(descriptor: int, *, data: memoryview) -> None:
    """Write all of it: a disk that is nearly full takes a part."""
    while len(data):
        data = data[os.write(descriptor, data) :]


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
