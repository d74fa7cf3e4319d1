"""Checkpoints: safetensors by full parameter name, JSON for the rest, whole or absent.

A checkpoint is a folder `step-00000100` with the ranks' safetensors files (torch's distributed
checkpoint with its Hugging Face storage), `state.json` and `checksums.json`. It is written under a
temporary name and renamed when every rank has finished. Nothing in it is a pickle, and nothing in
it depends on the engine: any layout loads it.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

from diptych.core.errors import FormatError
from diptych.core.files import write_text
from diptych.core.hashing import canonical_json, xxh3_file
from diptych.parallel.mesh import World, barrier
from diptych.parallel.moments import EMA, make_states, moments_of, tensors_in

VERSION = 1
MODEL_PREFIX = "model."
OPTIMIZER_PREFIX = "optimizer."
_STATE_FILE = "state.json"
_CHECKSUM_FILE = "checksums.json"


def tensors_of(model: nn.Module, *, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Name every tensor of a checkpoint: parameters, and their moments (made if not there yet).

    Also the running statistics of batch norms that all ranks share. The tensors are the live ones,
    so loading into them restores the run.
    """
    make_states(optimizer)
    moments = {
        parameter: moments_of(group)
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        tensors[MODEL_PREFIX + name] = parameter.detach()
        for moment in moments[parameter] if parameter.requires_grad else ():
            for part, tensor in tensors_in(optimizer.state[parameter][moment]).items():
                tensors[f"{OPTIMIZER_PREFIX}{name}.{moment}{part}"] = tensor
    return tensors | _shared_statistics(model)


def _shared_statistics(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        f"{MODEL_PREFIX}{name}.{statistic}": getattr(module, statistic)
        for name, module in model.named_modules()
        if isinstance(module, nn.SyncBatchNorm)
        for statistic in ("running_mean", "running_var")
    }


def save(
    folder: Path, *, tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any], world: World
) -> None:
    """Write a checkpoint; every rank calls it. The folder is complete when it has its name."""
    partial = folder.with_name(f".{folder.name}.partial")
    if world.is_first:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    barrier()
    with _quiet():
        save_distributed(
            dict(tensors),
            storage_writer=HuggingFaceStorageWriter(str(partial), save_distributed=True),
        )
    barrier()
    files = sorted(path.name for path in partial.glob("*.safetensors"))
    mine = {name: xxh3_file(partial / name) for name in files[world.rank :: world.size]}
    write_text(partial / f".sums-{world.rank}.json", text=json.dumps(mine))
    barrier()
    if world.is_first:
        _seal(partial, state=state, num_ranks=world.size)
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(partial, folder)
        _sync_folder(folder.parent)
    barrier()


def load(folder: Path, *, tensors: Mapping[str, torch.Tensor]) -> None:
    """Read a checkpoint into live tensors, whatever layout wrote it; every rank calls it.

    Raises:
        FormatError: a tensor is missing, superfluous, or of another shape.
    """
    stored = _stored_shapes(folder)
    wanted = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if stored != wanted:
        raise FormatError(
            f"The checkpoint {folder.name} does not fit the model: {_difference(stored, wanted)}",
            cure="Start the run anew, or restore the settings that it was trained with",
        )
    with _quiet():
        load_distributed(dict(tensors), storage_reader=HuggingFaceStorageReader(str(folder)))


def read_state(folder: Path) -> dict[str, Any]:
    """Read what is not a tensor.

    Raises:
        FormatError: the state is missing, damaged, or of another format version.
    """
    try:
        state = json.loads((folder / _STATE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FormatError(f"{folder} has no readable {_STATE_FILE}: {error}") from None
    if state.get("version") != VERSION:
        raise FormatError(
            f"The checkpoint {folder.name} has format version {state.get('version')}",
            allowed=f"This code reads version {VERSION}",
            cure="Use the release of Diptych that wrote it",
        )
    return state


def verify(folder: Path) -> None:
    """Compare every file with its checksum.

    Raises:
        FormatError: a file is missing, superfluous or changed.
    """
    try:
        sums = json.loads((folder / _CHECKSUM_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FormatError(f"The checkpoint {folder} has no readable checksums: {error}") from None
    found = {path.name for path in folder.iterdir()} - {_CHECKSUM_FILE}
    if found != set(sums):
        raise FormatError(f"The checkpoint {folder.name} has other files: {found ^ set(sums)}")
    for name, checksum in sums.items():
        if xxh3_file(folder / name) != checksum:
            raise FormatError(
                f"The checkpoint file {folder.name}/{name} is damaged",
                cure="Resume from an earlier checkpoint: delete this folder",
            )


def list_checkpoints(folder: Path) -> list[Path]:
    """List complete checkpoints, oldest first; what was cut off in the middle is not among them."""
    return sorted(path for path in folder.glob("step-*") if (path / _CHECKSUM_FILE).is_file())


def read_weights(
    folder: Path, *, weights: Literal["trained", "ema"] = "trained"
) -> dict[str, torch.Tensor]:
    """Read a checkpoint's weights whole, on the CPU, by full parameter name.

    Args:
        folder: the checkpoint's.
        weights: as they were trained, or their mean; what is frozen is its own mean.

    Raises:
        FormatError: a file is missing or changed, or no mean was kept.
    """
    verify(folder)
    trained = _read_whole(folder, prefix=MODEL_PREFIX)
    if weights == "trained":
        return trained
    means = _read_whole(folder, prefix=OPTIMIZER_PREFIX, suffix=f".{EMA}")
    if not means:
        raise FormatError(
            f"The checkpoint {folder.name} has no mean of the weights (EMA)",
            cure="Set export.weights to trained, or train with train.ema_decay, such as 0.999",
        )
    return {name: means.get(name, weight) for name, weight in trained.items()}


def _read_whole(folder: Path, *, prefix: str, suffix: str = "") -> dict[str, torch.Tensor]:
    reader = HuggingFaceStorageReader(str(folder))
    with _quiet():
        metadata = reader.read_metadata()
        tensors: dict[str, Any] = {
            name: torch.empty(entry.size, dtype=entry.properties.dtype)
            for name, entry in metadata.state_dict_metadata.items()
            if name.startswith(prefix)
            and name.endswith(suffix)
            and isinstance(entry, TensorStorageMetadata)
        }
        load_distributed(tensors, storage_reader=reader, no_dist=True)
    return {
        name.removeprefix(prefix).removesuffix(suffix): tensor for name, tensor in tensors.items()
    }


def _seal(partial: Path, *, state: Mapping[str, Any], num_ranks: int) -> None:
    sums: dict[str, str] = {}
    for rank in range(num_ranks):
        part = partial / f".sums-{rank}.json"
        sums.update(json.loads(part.read_text(encoding="utf-8")))
        part.unlink()
    write_text(partial / _STATE_FILE, text=canonical_json({**state, "version": VERSION}) + "\n")
    sums[_STATE_FILE] = xxh3_file(partial / _STATE_FILE)
    write_text(partial / _CHECKSUM_FILE, text=canonical_json(sums) + "\n")
    for path in partial.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _stored_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    with _quiet():
        metadata = HuggingFaceStorageReader(str(folder)).read_metadata()
    return {
        name: tuple(entry.size)
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def _difference(
    stored: dict[str, tuple[int, ...]], wanted: dict[str, tuple[int, ...]], *, most: int = 5
) -> str:
    parts = [f"{name} is missing" for name in wanted.keys() - stored.keys()]
    parts += [f"{name} is not in the model" for name in stored.keys() - wanted.keys()]
    parts += [
        f"{name} is {list(stored[name])}, the model has {list(wanted[name])}"
        for name in wanted.keys() & stored.keys()
        if stored[name] != wanted[name]
    ]
    rest = f" and {len(parts) - most} more" if len(parts) > most else ""
    return "; ".join(sorted(parts)[:most]) + rest


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide torch's warnings on saving without a process group and on typed storages."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
