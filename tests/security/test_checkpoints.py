"""Poisoned checkpoints: pickles under every name, and safetensors whose headers lie."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import FileSystemReader

from diptych.core.errors import ConfigError, DiptychError, FormatError
from diptych.core.hashing import canonical_json, xxh3_file
from diptych.model.tensor_files import TensorFiles
from diptych.parallel import storage
from diptych.parallel.mesh import World
from tests.security.canary import Canary

FILES = (".metadata", "optimizer.pt", "model.bin", "rng.pth", "state.pkl", "notes.txt")
ALONE = World(rank=0, size=1, device=torch.device("cpu"))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoints" / "step-00000002"
    tensors = {"model.a": torch.arange(64.0).view(8, 8), "model.b": torch.ones(8)}
    storage.save(folder, tensors=tensors, state={"step": 2}, world=ALONE)
    return folder


def wanted() -> dict[str, torch.Tensor]:
    return {"model.a": torch.zeros(8, 8), "model.b": torch.zeros(8)}


def seal(folder: Path) -> None:
    """Give every file a right checksum, as somebody who poisons a checkpoint would."""
    sums = {
        path.name: xxh3_file(path) for path in folder.iterdir() if path.name != "checksums.json"
    }
    (folder / "checksums.json").write_text(canonical_json(sums))


def read_all(folder: Path) -> list[str]:
    """Do with a checkpoint whatever Diptych does; return the refusals."""
    refusals = []
    for act in (
        storage.verify,
        storage.read_state,
        storage.read_weights,
        lambda path: storage.load(path, tensors=wanted()),
    ):
        try:
            act(folder)
        except DiptychError as error:
            refusals.append(str(error))
    return refusals


@pytest.mark.parametrize("name", FILES)
def test_a_pickle_beside_the_tensors(canary: Canary, checkpoint: Path, name: str) -> None:
    (checkpoint / name).write_bytes(canary.pickled)
    canary.proves(lambda: pickle.loads((checkpoint / name).read_bytes()))
    if name == ".metadata":
        # What torch's own reader of distributed checkpoints does.
        canary.proves(lambda: FileSystemReader(checkpoint).read_metadata(), raises=Exception)
    assert any("does not belong there" in words for words in read_all(checkpoint))
    seal(checkpoint)
    read_all(checkpoint)


@pytest.mark.parametrize("name", ["state.json", "checksums.json", "*.safetensors"])
def test_a_pickle_in_the_place_of_a_file(canary: Canary, checkpoint: Path, name: str) -> None:
    [path] = checkpoint.glob(name)
    path.write_bytes(canary.pickled)
    canary.proves(lambda: pickle.loads(path.read_bytes()))
    if name != "checksums.json":
        seal(checkpoint)
    read = storage.read_state if name == "state.json" else storage.read_weights
    with pytest.raises(BaseException) as caught:
        read(checkpoint)
    assert not isinstance(caught.value, SystemExit | KeyboardInterrupt)


def header_of(path: Path) -> tuple[dict[str, Any], bytes]:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def write_header(path: Path, *, header: Any, data: bytes, length: int | None = None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)


def overlapping(header: dict[str, Any]) -> None:
    for entry in header.values():
        if "data_offsets" in entry:
            start, end = entry["data_offsets"]
            entry["data_offsets"] = [0, end - start]


def out_of_range(header: dict[str, Any]) -> None:
    for entry in header.values():
        if "data_offsets" in entry:
            entry["data_offsets"] = [at + 4096 for at in entry["data_offsets"]]


def of_a_large_shape(header: dict[str, Any]) -> None:
    for entry in header.values():
        if "shape" in entry:
            entry["shape"] = [1 << 20, 1 << 20]


def with_a_negative_offset(header: dict[str, Any]) -> None:
    for entry in header.values():
        if "data_offsets" in entry:
            entry["data_offsets"] = [-8, 248]


LIES = [overlapping, out_of_range, of_a_large_shape, with_a_negative_offset]


def weights_of(folder: Path, canary: Canary) -> Path:
    """Write weights as somebody else's model has them; the files say what they should."""
    folder.mkdir()
    path = folder / "model.safetensors"
    save_file({"a": torch.arange(64.0).view(8, 8), "b": torch.ones(8)}, path)
    canary.shows(float(load_file(path)["a"][7, 7]) == 63.0)
    return path


@pytest.mark.parametrize("lie", LIES)
def test_a_header_of_weights_that_lies(canary: Canary, tmp_path: Path, lie: Any) -> None:
    path = weights_of(tmp_path / "weights", canary)
    header, data = header_of(path)
    lie(header)
    write_header(path, header=header, data=data)
    with pytest.raises(ConfigError):
        TensorFiles(path.parent).read("a")


@pytest.mark.parametrize("lie", LIES)
def test_a_header_of_a_checkpoint_that_lies(canary: Canary, checkpoint: Path, lie: Any) -> None:
    [path] = checkpoint.glob("*.safetensors")
    canary.shows(torch.equal(storage.read_weights(checkpoint)["b"], torch.ones(8)))
    header, data = header_of(path)
    lie(header)
    write_header(path, header=header, data=data)
    with pytest.raises(FormatError, match="damaged"):
        storage.verify(checkpoint)
    seal(checkpoint)
    with pytest.raises(BaseException) as caught:
        storage.read_weights(checkpoint)
    assert not isinstance(caught.value, MemoryError | KeyboardInterrupt | SystemExit)


@pytest.mark.parametrize("length", [2**63, 2**40, 2**31])
def test_a_header_that_claims_to_be_huge(canary: Canary, tmp_path: Path, length: int) -> None:
    path = weights_of(tmp_path / "weights", canary)
    header, data = header_of(path)
    write_header(path, header=header, data=data, length=length)
    with pytest.raises(ConfigError):
        TensorFiles(path.parent)
