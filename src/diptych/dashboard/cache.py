"""What was read of long logs, kept between servers: columns in, a file of the user's cache out.

A file stands for the first bytes of one log. It is used only where the log still is that log: the
same inode, and the same bytes before the end. Files are Arrow's, mapped into memory, never pickles.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import xxhash

from diptych.core.files import replacing
from diptych.dashboard.columns import Columns

_VERSION = 1
_MOST_BYTES = 4 * 1024**3
_GUARD_BYTES = 64 * 1024


class Position(NamedTuple):
    """How far a log was read: `offset` bytes of the file `inode`, of which `guard` is the hash."""

    inode: int
    offset: int
    guard: str


def guard(path: Path, *, offset: int) -> str:
    """Hash the first bytes of a log and those before an offset: does it still begin so?"""
    with path.open("rb") as file:
        head = file.read(min(offset, _GUARD_BYTES))
        file.seek(max(0, offset - _GUARD_BYTES))
        return xxhash.xxh3_128_hexdigest(head + file.read(min(offset, _GUARD_BYTES)))


def default_folder() -> Path:
    """Return the folder in the user's cache, as the XDG base directories say."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "diptych" / "dashboard"


class Cache:
    """Columns of logs in a folder; a folder that cannot be written keeps nothing, and says nothing.

    What was used least recently goes first where all files together grow beyond `most_bytes`.
    """

    def __init__(self, folder: Path | None, *, most_bytes: int = _MOST_BYTES) -> None:
        self._folder = folder
        self._most_bytes = most_bytes

    def load(self, log: Path) -> tuple[Position, Columns] | None:
        """Return what is kept of a log; None where there is nothing, or it is of another log."""
        path = self._path(log)
        if path is None:
            return None
        try:
            with pa.memory_map(str(path)) as source:
                table = pa.ipc.open_file(source).read_all()
            facts = json.loads((table.schema.metadata or {}).get(b"diptych", b"{}"))
            if facts.get("version") != _VERSION or facts.get("log") != str(log.resolve()):
                return None
            position = Position(*facts["position"])
            stat = log.stat()
            if stat.st_ino != position.inode or stat.st_size < position.offset:
                return None
            if guard(log, offset=position.offset) != position.guard:
                return None
            os.utime(path)
            return position, {
                name: table.column(name).combine_chunks().to_numpy(zero_copy_only=False)
                for name in table.column_names
            }
        except (OSError, ValueError, TypeError, KeyError, pa.ArrowException):
            return None

    def save(self, log: Path, *, position: Position, columns: Columns) -> None:
        """Keep what was read of a log."""
        path = self._path(log)
        if path is None or not columns:
            return
        facts = {"version": _VERSION, "log": str(log.resolve()), "position": list(position)}
        arrays = {name: np.ascontiguousarray(values) for name, values in columns.items()}
        table = pa.table(arrays).replace_schema_metadata({"diptych": json.dumps(facts)})
        with suppress(OSError, pa.ArrowException):
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with (
                replacing(path) as partial,
                pa.OSFile(str(partial), "wb") as sink,
                pa.ipc.new_file(sink, table.schema) as writer,
            ):
                writer.write_table(table)
            self._trim(path)

    def _path(self, log: Path) -> Path | None:
        if self._folder is None:
            return None
        return self._folder / f"{xxhash.xxh3_128_hexdigest(str(log.resolve()).encode())}.arrow"

    def _trim(self, newest: Path) -> None:
        """Drop files that were used least recently until the rest are few enough bytes."""
        files = [(path, path.stat()) for path in newest.parent.glob("*.arrow")]
        left = sum(stat.st_size for _, stat in files)
        for path, stat in sorted(files, key=lambda each: each[1].st_mtime):
            if left <= self._most_bytes or path == newest:
                return
            path.unlink(missing_ok=True)
            left -= stat.st_size
