"""The tensors of safetensors files by name: a folder flows in; shapes, then rows, flow out.

Files are mapped into memory, so that a tensor costs what is read of it. What the names mean to a
model is unknown here.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from diptych.core.errors import ConfigError
from diptych.model.revision import list_files

_FLOATS = ("F32", "BF16", "F16", "F64")


class TensorFiles:
    """Opened safetensors; only headers are read before `read`.

    Attributes:
        shapes: of every tensor, by its name in the files.
        quantised: names of those that are no floating-point numbers a model trains in.
    """

    def __init__(self, folder: Path) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.quantised: set[str] = set()
        self._slices: dict[str, Any] = {}
        for path in list_files(folder):
            try:
                file = safe_open(path, framework="pt")
                for name in file.keys():  # noqa: SIM118 - not a mapping
                    self._add(name, found=file.get_slice(name), path=path)
            except (OSError, SafetensorError) as error:
                raise ConfigError(
                    f"{path} is no safetensors file that can be read: {error}",
                    cure="Copy or download the weights again",
                ) from error

    def read(self, name: str, *, slices: Sequence[slice] | None = None) -> torch.Tensor:
        """Return a tensor, or a part of it, in its own dtype on the CPU."""
        found = self._slices[name]
        if slices is None or not self.shapes[name]:
            return found[...]
        return found[tuple(slices)]

    def _add(self, name: str, *, found: Any, path: Path) -> None:
        if name in self.shapes:
            raise ConfigError(
                f"The tensor '{name}' is in {path.name} and in another file",
                cure="Save the weights anew with transformers' save_pretrained",
            )
        if found.get_dtype() not in _FLOATS:
            self.quantised.add(name)
        self.shapes[name] = tuple(found.get_shape())
        self._slices[name] = found
