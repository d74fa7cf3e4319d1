"""Checkpoints: safetensors by full parameter name, JSON for the rest, whole or absent.

A checkpoint is a folder `step-00000100` with the ranks' safetensors files (as torch's distributed
checkpoint lays them out for Hugging Face), `state.json`, the run's logs up to there and
`checksums.json`. It is written under a temporary name and renamed when every rank has finished
(`writing`). Nothing in it is a pickle, and nothing depends on the engine: any layout loads it.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from torch import nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed

from diptych.core.errors import FormatError, VersionError
from diptych.core.hashing import xxh3_file
from diptych.parallel.mesh import World, barrier, gather_numbers
from diptych.parallel.moments import EMA, make_states, moments_of, tensors_in
from diptych.parallel.writing import (
    CHECKSUM_FILE,
    STATE_FILE,
    discard,
    partial_folder,
    pieces_of,
    seal,
    write_part,
)

VERSION = 2
"""2 has the run's logs and its scores in it; a checkpoint of version 1 is read as one without."""
MODEL_PREFIX = "model."
OPTIMIZER_PREFIX = "optimizer."


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
    folder: Path,
    *,
    tensors: Mapping[str, torch.Tensor],
    state: Mapping[str, Any],
    world: World,
    logs: Mapping[str, bytes] | None = None,
) -> None:
    """Write a checkpoint and wait for it; every rank calls it. It is whole when it has its name.

    Raises:
        FormatError: a rank could not write its part; nothing of it is left.
    """
    partial = partial_folder(folder, number=0)
    if world.is_first:
        discard(partial)
    barrier()
    failure: OSError | None = None
    try:
        pieces = pieces_of(tensors, rank=world.rank, world_size=world.size)
        write_part(partial, pieces=pieces, rank=world.rank, world_size=world.size)
    except OSError as error:
        failure = error
    num_failed = int(gather_numbers([failure is not None], world=world).sum())
    if world.is_first:
        if num_failed:
            discard(partial)
        else:
            whole = {**state, "version": VERSION}
            seal(partial, folder=folder, state=whole, logs=logs or {}, world_size=world.size)
    barrier()
    if num_failed:
        raise FormatError(
            f"The checkpoint {folder.name} could not be written: {failure or 'by another rank'}",
            cure="Free some room, or look at the disk",
        )


def load(folder: Path, *, tensors: Mapping[str, torch.Tensor]) -> None:
    """Read a checkpoint into live tensors, whatever layout wrote it; every rank calls it.

    Raises:
        FormatError: a tensor is missing, superfluous, or of another shape.
    """
    stored = stored_shapes(folder)
    wanted = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if stored != wanted:
        raise FormatError(
            f"The checkpoint {folder.name} does not fit the model: {_difference(stored, wanted)}",
            cure="Start the run anew, or restore the settings that it was trained with",
        )
    read_into(folder, tensors=tensors)


def read_into(folder: Path, *, tensors: Mapping[str, torch.Tensor]) -> None:
    """Read some of a checkpoint's tensors; each rank what it holds of them."""
    with _quiet():
        # Each rank finds what it needs by itself: no object is sent between ranks, or unpickled.
        load_distributed(
            dict(tensors), storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True
        )


def read_state(folder: Path) -> dict[str, Any]:
    """Read what is not a tensor.

    Raises:
        FormatError: the state is missing, damaged, or of another format version.
    """
    try:
        state = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FormatError(f"{folder} has no readable {STATE_FILE}: {error}") from None
    version = state.get("version") if isinstance(state, dict) else None
    if version not in (1, VERSION):
        raise VersionError(
            f"The checkpoint {folder.name} has format version {version}",
            allowed=f"This code reads versions 1 to {VERSION}",
            cure="Use the release of Diptych that wrote it",
        )
    return {"scores": {}, **state}


def verify(folder: Path, *, rank: int = 0, world_size: int = 1) -> None:
    """Compare files with their checksums: all of them, or a rank's share of them.

    Raises:
        FormatError: a file is missing, superfluous or changed.
    """
    try:
        sums = json.loads((folder / CHECKSUM_FILE).read_text(encoding="utf-8"))
        found = {path.name for path in folder.iterdir()} - {CHECKSUM_FILE}
    except (OSError, ValueError) as error:
        raise FormatError(f"The checkpoint {folder} has no readable checksums: {error}") from None
    if found != set(sums):
        raise FormatError(f"The checkpoint {folder.name} is not whole: {_names(found, sums)}")
    for name in sorted(sums)[rank::world_size]:
        if _checksum(folder / name) != sums[name]:
            raise FormatError(
                f"The checkpoint file {folder.name}/{name} is damaged",
                cure="Use an earlier checkpoint, or a copy of this one",
            )


def _names(found: set[str], sums: Mapping[str, str]) -> str:
    parts = [f"{name} is missing" for name in sorted(set(sums) - found)]
    parts += [f"{name} does not belong there" for name in sorted(found - set(sums))]
    return ", ".join(parts)


def _checksum(path: Path) -> str | None:
    """Hash a plain file; None if it cannot be read."""
    try:
        return xxh3_file(path) if path.is_file() and not path.is_symlink() else None
    except OSError:
        return None


def list_checkpoints(folder: Path) -> list[Path]:
    """List complete checkpoints, oldest first; what was cut off in the middle is not among them."""
    return sorted(path for path in folder.glob("step-*") if (path / CHECKSUM_FILE).is_file())


def list_weights(folder: Path) -> dict[int, Path]:
    """List complete saves of weights alone, by step."""
    found = (path for path in folder.glob("weights-*") if (path / CHECKSUM_FILE).is_file())
    return {step_of(path): path for path in found}


def step_of(folder: Path) -> int:
    """Return the step that a checkpoint's name says."""
    return int(folder.name.rpartition("-")[2])


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


def stored_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Read the names and shapes of a checkpoint's tensors.

    Raises:
        FormatError: a file's header cannot be read.
    """
    try:
        with _quiet():
            metadata = HuggingFaceStorageReader(str(folder)).read_metadata()
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise FormatError(f"The checkpoint {folder.name} cannot be read: {error}") from None
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
