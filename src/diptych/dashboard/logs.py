"""Logs that grow, as columns: a path in, what is known of it now out, at once whatever its size.

Of a long log that was not read yet, lines spread over it are shown first, while a thread reads all
of it; from then on only what is new is read. A log that was cut or replaced is read anew.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np

from diptych.dashboard.cache import Cache, Position, guard
from diptych.dashboard.columns import PRECISE, Columns
from diptych.monitor.tails import sample_lines

Parse = Callable[[bytes], Columns]

AT_ONCE_BYTES = 3 * 1024 * 1024
_CHUNK_BYTES = 16 * 1024 * 1024
_PREVIEW_LINES = 400
_KEPT_BYTES = 8 * 1024 * 1024
_GROWN = 1.25
_WAIT_S = 0.5
_NICE = 10
_MOST_CHUNKS = 32
_MOST_LOGS = 32


class Table:
    """Columns that grow by chunks; a column that a chunk lacks is NaN there."""

    def __init__(self) -> None:
        self._chunks: list[tuple[int, Columns]] = []
        self._joined: Columns = {}

    def add(self, columns: Columns) -> None:
        """Append rows."""
        if not columns:
            return
        self._chunks.append((len(next(iter(columns.values()))), columns))
        self._joined = {}
        if len(self._chunks) > _MOST_CHUNKS:
            whole = self.all()
            self._chunks = [(self.num_rows, whole)]

    @property
    def num_rows(self) -> int:
        """Rows so far."""
        return sum(num for num, _ in self._chunks)

    @property
    def names(self) -> list[str]:
        """Every column that any row has, in the order in which they came."""
        return list(dict.fromkeys(name for _, chunk in self._chunks for name in chunk))

    def column(self, name: str) -> np.ndarray:
        """Return one column, [N]; NaN throughout where there is none of this name."""
        if name not in self._joined:
            kind = np.float64 if name in PRECISE else np.float32
            parts = [
                chunk.get(name, np.full(num, np.nan, dtype=kind)) for num, chunk in self._chunks
            ]
            joined = parts[0] if len(parts) == 1 else np.concatenate(parts or [np.zeros(0, kind)])
            self._joined[name] = joined
        return self._joined[name]

    def all(self) -> Columns:
        """Return every column."""
        return {name: self.column(name) for name in self.names}


class Log:
    """One log: `look` says what is known of it now."""

    def __init__(self, path: Path, *, parse: Parse, cache: Cache, pool: ThreadPoolExecutor) -> None:
        self.path = path
        self._parse = parse
        self._cache = cache
        self._pool = pool
        self._lock = threading.Lock()
        self._table = Table()
        self._position: Position | None = None
        self._preview: tuple[tuple[int, int], Table] | None = None
        self._reading = False
        self._tried_cache = False
        self._kept_offset = 0

    def look(self) -> tuple[Table, str]:
        """Return what is known now, and a word that changes when more is."""
        with self._lock:
            try:
                stat = self.path.stat()
            except OSError:
                return Table(), "none"
            self._prepare(stat.st_ino, size=stat.st_size)
            offset = self._position.offset if self._position else 0
            if stat.st_size - offset > AT_ONCE_BYTES:
                self._begin_reading()
            if self._reading:
                # To its end: until then the table lacks what lies between.
                table = self._show_preview(stat.st_ino, size=stat.st_size)
                return table, f"preview {stat.st_ino}"
            if stat.st_size > offset:
                with suppress(OSError):
                    self._read(self._table, end=stat.st_size)
            return self._table, f"{stat.st_ino} {self._table.num_rows}"

    def _prepare(self, inode: int, *, size: int) -> None:
        """Begin anew where the file is another one; take over what is kept of it."""
        position = self._position
        is_other = position is not None and (position.inode != inode or size < position.offset)
        if is_other and not self._reading:
            self._table, self._position, self._preview = Table(), None, None
            self._tried_cache = False
        if self._position is None and not self._tried_cache and not self._reading:
            self._tried_cache = True
            kept = self._cache.load(self.path) if size > _KEPT_BYTES else None
            if kept is not None:
                self._position, columns = kept
                self._kept_offset = self._position.offset
                self._table = Table()
                self._table.add(columns)

    def _show_preview(self, inode: int, *, size: int) -> Table:
        if self._preview is None or self._preview[0][0] != inode:
            lines = sample_lines(self.path, num_lines=_PREVIEW_LINES)
            table = Table()
            table.add(self._parse(b"\n".join(lines) + b"\n"))
            self._preview = ((inode, size), table)
        return self._preview[1]

    def _begin_reading(self) -> None:
        if not self._reading:
            self._reading = True
            self._pool.submit(self._read_all)

    def _read_all(self) -> None:
        """Read the rest, then say so; runs in a thread, and nothing else changes the table then."""
        try:
            time.sleep(_WAIT_S)  # what was asked for first is answered first
            while True:
                size = self.path.stat().st_size
                before = self._position.offset if self._position else 0
                if size - before <= AT_ONCE_BYTES:
                    break
                self._read(self._table, end=min(size, before + _CHUNK_BYTES))
            self._keep()
        except OSError:
            pass  # gone or replaced: the next look begins anew
        finally:
            self._reading = False

    def _read(self, table: Table, *, end: int) -> None:
        """Read from where the table ends up to the last whole line before `end`.

        Raises:
            OSError: the file is another one by now.
        """
        offset = self._position.offset if self._position else 0
        with self.path.open("rb") as file:
            inode = os.fstat(file.fileno()).st_ino
            if self._position and self._position.inode != inode:
                raise OSError(f"{self.path} was replaced")
            file.seek(offset)
            data = file.read(end - offset)
        num_bytes = data.rfind(b"\n") + 1
        if not num_bytes and len(data) >= _CHUNK_BYTES:
            num_bytes = len(data)  # no line of ours is that long
        if num_bytes:
            table.add(self._parse(data[:num_bytes]))
            self._position = Position(inode, offset + num_bytes, "")

    def _keep(self) -> None:
        position = self._position
        if position is None or position.offset < max(_KEPT_BYTES, _GROWN * self._kept_offset):
            return
        position = position._replace(guard=guard(self.path, offset=position.offset))
        self._cache.save(self.path, position=position, columns=self._table.all())
        self._kept_offset = position.offset


class Logs:
    """The logs that were looked at last; one thread reads long ones, one after the other."""

    def __init__(self, *, cache: Cache) -> None:
        self._cache = cache
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="reads-logs", initializer=_give_way)
        self._logs: OrderedDict[Path, Log] = OrderedDict()
        self._lock = threading.Lock()

    def look(self, path: Path, *, parse: Parse) -> tuple[Table, str]:
        """Return what is known of a log now, and a word that changes when more is."""
        with self._lock:
            log = self._logs.get(path)
            if log is None:
                log = Log(path, parse=parse, cache=self._cache, pool=self._pool)
                self._logs[path] = log
            self._logs.move_to_end(path)
            while len(self._logs) > _MOST_LOGS:
                self._logs.popitem(last=False)
        return log.look()

    def close(self) -> None:
        """End the thread; what it reads now is read to its chunk's end."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _give_way() -> None:
    """Have this thread compute when no other wants to."""
    with suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
