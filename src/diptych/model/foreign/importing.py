"""`kedro import-weights`: another trainer's checkpoint in, a folder that training begins with out.

Nothing of the checkpoint is read here but the names of its files; `convert` reads it, confined.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diptych.core import errors
from diptych.core.errors import ConfigError, DiptychError, FormatError
from diptych.core.sandbox import run_confined
from diptych.model.foreign.convert import RESULT, WEIGHTS
from diptych.model.revision import CONFIG, list_files

_SUFFIXES = (".safetensors", ".safetensors.index.json")


@dataclass(frozen=True)
class Limits:
    """What the confined process may take. Memory counts beside what the checkpoint's files take."""

    memory_gib: float = 24.0
    minutes: float = 60.0


@dataclass(frozen=True)
class Imported:
    """What was made, and what the process that made it could do."""

    form: str
    num_tensors: int
    num_bytes: int
    dtypes: tuple[str, ...]
    prefix: str
    num_left_out: int
    held: tuple[str, ...]
    open: tuple[str, ...]


def import_weights(
    checkpoint: Path, *, out: Path, config: Path | None = None, limits: Limits | None = None
) -> Imported:
    """Convert a checkpoint into a folder for `plan.model.weights`.

    Args:
        checkpoint: a folder or a file of another trainer's.
        out: the folder that is made; it must not exist.
        config: config.json of the model, or its folder; None looks in the checkpoint and beside it.
        limits: of the process that reads it.

    Raises:
        ConfigError: there is no checkpoint, no config, or the two do not fit; or `out` is there.
        FormatError: a file is damaged, or asks for what is no tensor.
        RunError: reading took more memory or time than it may.
    """
    if sys.platform != "linux":
        raise ConfigError(
            "Checkpoints of other trainers are read in a sandbox, which is built for Linux alone",
            cure="Run the command on Linux, and copy the folder that it makes",
        )
    if not checkpoint.exists():
        raise ConfigError(f"There is no checkpoint '{checkpoint}'", cure="Correct the path")
    if out.exists():
        raise ConfigError(
            f"'{out}' is there already", cure="Name a new folder, or move that one away"
        )
    limits = limits or Limits()
    found = _find_config(checkpoint, given=config)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".import-", dir=out.parent) as name:
        box = Path(name).resolve()
        beside = box / "config"
        beside.mkdir()
        text = found.read_bytes()
        (beside / CONFIG).write_bytes(text)
        _check_config(beside / CONFIG)
        memory = int(limits.memory_gib * 2**30) + 2 * _count_bytes(checkpoint)
        seconds = max(1, round(60 * limits.minutes))
        command = [
            "diptych.model.foreign.convert",
            *map(str, (checkpoint.resolve(), beside, box, memory, seconds)),
        ]
        run_confined(command, folder=box, what="read the checkpoint", limit_s=seconds)
        result = _read_result(box / RESULT)
        _check_weights(box / WEIGHTS)
        # What was checked, not what the process may have made of it.
        (box / WEIGHTS / CONFIG).write_bytes(text)
        os.replace(box / WEIGHTS, out)
    return result


def _find_config(checkpoint: Path, *, given: Path | None) -> Path:
    folder = checkpoint if checkpoint.is_dir() else checkpoint.parent
    places = [folder, folder.resolve().parent] if given is None else [given]
    for place in places:
        path = place if place.is_file() else place / CONFIG
        if path.is_file():
            return path
    raise ConfigError(
        f"There is no {CONFIG} in {' or '.join(repr(str(place)) for place in places)}",
        allowed="The model's config, as transformers' save_pretrained writes it",
        cure="Name it or its folder with --config",
    )


def _check_config(path: Path) -> None:
    # Transformers costs seconds to import, and this module is imported by a command's start.
    from diptych.model import config_file

    config_file.check(path)


def _count_bytes(checkpoint: Path) -> int:
    files = [checkpoint] if checkpoint.is_file() else checkpoint.rglob("*")
    return sum(path.stat().st_size for path in files if path.is_file())


def _read_result(path: Path) -> Imported:
    """Read what the confined process says; its words are taken as text."""
    try:
        result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        confined = result.pop("confined")
        if "error" in result:
            raise _error(result)
        return Imported(
            **{**result, "dtypes": tuple(result["dtypes"])},
            held=tuple(confined["held"]),
            open=tuple(confined["open"]),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FormatError(f"The confined process has left no result: {error}") from None


def _error(result: dict[str, Any]) -> DiptychError:
    kind = getattr(errors, str(result["error"]), FormatError)
    found, allowed, cure = (_printable(result[key]) for key in ("found", "allowed", "cure"))
    return kind(found, allowed=allowed, cure=cure)


def _printable(text: Any) -> str:
    return "".join(each for each in str(text)[:4000] if each.isprintable() or each == "\n")


def _check_weights(folder: Path) -> None:
    """Refuse anything but plain safetensors files and their index."""
    if folder.is_symlink():
        raise FormatError(f"The confined process has left '{folder.name}'")
    for path in folder.iterdir():
        if path.is_symlink() or not path.is_file() or not path.name.endswith(_SUFFIXES):
            raise FormatError(f"The confined process has left '{path.name}'")
    list_files(folder)
