"""Whole state dicts: `pytorch_model.bin` and its parts, `.pt` and `.pth` files."""

from __future__ import annotations

import json
import re
from pathlib import Path

from diptych.core.files import inside
from diptych.model.foreign.pickles import damaged, read_tensors
from diptych.model.foreign.stored import Found, Stored, flatten

_WHOLE = "pytorch_model.bin"
_INDEX = "pytorch_model.bin.index.json"
_SUFFIXES = (".bin", ".pt", ".pth")
_BESIDE = re.compile(r"optim|sched|rng|random|train|scaler|tokenizer|loss")
"""What trainers save beside the model; some of it is of classes of their own."""


def find_files(path: Path) -> list[Path]:
    """List the files of a state dict: one, those that an index names, or all that may hold one."""
    if path.is_file():
        return [path]
    if (path / _WHOLE).is_file():
        return [path / _WHOLE]
    index = path / _INDEX
    if not index.is_file():
        found = (each for each in path.iterdir() if each.suffix in _SUFFIXES)
        return sorted(each for each in found if not _BESIDE.match(each.name))
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise damaged(index, why=f"{type(error).__name__}: {error}") from None
    return [inside(str(name), folder=path) for name in names]


def read_whole(files: list[Path]) -> Found:
    """Read state dicts; the tensors of several files are put side by side.

    Raises:
        FormatError: a file is no state dict, or holds what is no tensor.
    """
    tensors: dict[str, Stored] = {}
    for path in files:
        values = read_tensors(path)
        if not isinstance(values, dict):
            raise damaged(path, why=f"it holds a {type(values).__name__}, no state dict")
        found = flatten(values)
        if twice := tensors.keys() & found.keys():
            raise damaged(path, why=f"{min(twice)} is in another file, too")
        tensors |= found
    return Found(form=f"a state dict in {len(files)} files", tensors=tensors)
