"""Write whole files or folders, or nothing: a temporary name beside the target, then a rename."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from diptych.core.errors import DataError


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; rename it over `path` when the block ends well."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """Yield a new empty folder beside `path`; it takes `path`'s place when the block ends well."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    former = path.with_name(f".{path.name}.{os.getpid()}.former")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        yield partial
        if path.exists():
            os.replace(path, former)
        os.replace(partial, path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(former, ignore_errors=True)


def write_text(path: Path, *, text: str) -> None:
    """Replace a text file at once."""
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")


def write_bytes(path: Path, *, data: bytes) -> None:
    """Replace a file at once."""
    with replacing(path) as partial:
        partial.write_bytes(data)


def inside(path: str, *, folder: Path) -> Path:
    """Join a relative path to a folder.

    Raises:
        DataError: the path is absolute or leaves the folder (through `..` or a link).
    """
    joined = folder / path
    if Path(path).is_absolute() or not joined.resolve().is_relative_to(folder.resolve()):
        raise DataError(
            f"The path '{path}' leaves the folder '{folder}'",
            allowed="Only files inside that folder can be read",
            cure="Move the file there, or name another folder",
        )
    return joined
