"""Torch's distributed checkpoints, as FSDP trainers save them: `.metadata` and `.distcp` files.

Source: `FileSystemReader` of torch.distributed.checkpoint. Differs: the metadata's pickle is read
by names that are known, and what is no tensor is not read at all.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from diptych.core.files import inside
from diptych.model.foreign.pickles import damaged, read_blob, read_metadata
from diptych.model.foreign.stored import Found, Stored

METADATA = ".metadata"


def read_distributed(folder: Path) -> Found:
    """List the tensors of a checkpoint.

    Raises:
        FormatError: its metadata cannot be read, or do not cover a tensor.
    """
    path = folder / METADATA
    metadata = read_metadata(path)
    places = getattr(metadata, "storage_data", None)
    entries = getattr(metadata, "state_dict_metadata", None)
    if not isinstance(places, dict) or not isinstance(entries, dict):
        raise damaged(path, why="it is no metadata of a distributed checkpoint")
    tensors = {}
    for name, entry in entries.items():
        if isinstance(entry, TensorStorageMetadata):
            covered = sum(chunk.sizes.numel() for chunk in entry.chunks)
            if covered != entry.size.numel():
                raise damaged(path, why=f"its parts of {name} do not make {list(entry.size)}")
            tensors[name] = Stored(
                shape=tuple(entry.size),
                dtype=entry.properties.dtype,
                read=partial(_read, folder, name, entry=entry, places=places),
            )
    num_files = len({getattr(place, "relative_path", None) for place in places.values()})
    return Found(form=f"torch's distributed checkpoint, {num_files} files", tensors=tensors)


def _read(
    folder: Path, name: str, *, entry: TensorStorageMetadata, places: dict[Any, Any]
) -> torch.Tensor:
    """Put a tensor together from its parts."""
    whole = torch.empty(entry.size, dtype=entry.properties.dtype)
    for chunk in entry.chunks:
        place = places.get(MetadataIndex(name, chunk.offsets))
        if place is None:
            raise damaged(folder / METADATA, why=f"it does not say where a part of {name} lies")
        path = inside(str(place.relative_path), folder=folder)
        if place.__dict__.get("transform_descriptors"):
            raise damaged(path, why=f"{name} is stored in a form that is not built")
        with path.open("rb") as file:
            file.seek(place.offset)
            part = read_blob(file.read(place.length), path=path)
        if part.shape != chunk.sizes:
            raise damaged(path, why=f"a part of {name} is {list(part.shape)}")
        target = whole
        for dim, (offset, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
            target = target.narrow(dim, offset, size)
        target.copy_(part)
    return whole
