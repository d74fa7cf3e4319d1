"""What a format's reader finds: tensors by the names in the files, read when they are asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Stored:
    """One tensor of a checkpoint."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]

    @property
    def num_bytes(self) -> int:
        """Count the bytes of its elements."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Found:
    """A checkpoint: in which form it was, and what it holds."""

    form: str
    tensors: dict[str, Stored]


def stored_from(tensor: torch.Tensor) -> Stored:
    """Wrap a tensor that is there, in memory or mapped."""
    return Stored(shape=tuple(tensor.shape), dtype=tensor.dtype, read=lambda: tensor)


def flatten(values: Any, *, prefix: str = "") -> dict[str, Stored]:
    """Name the tensors in nested dictionaries by dotted path; what is no tensor is left out."""
    found: dict[str, Stored] = {}
    for name, value in values.items():
        if isinstance(value, torch.Tensor):
            found[f"{prefix}{name}"] = stored_from(value)
        elif isinstance(value, dict):
            found |= flatten(value, prefix=f"{prefix}{name}.")
    return found
