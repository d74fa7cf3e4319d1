"""The ends of files that grow: a path in, its last lines out, whatever the file's size."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_CHUNK_BYTES = 64 * 1024


def last_lines(path: Path, *, most_bytes: int) -> list[bytes]:
    """Return the whole lines within a file's last bytes, in order; none where there is no file.

    A line that is still being written is left out.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            begin = max(0, size - most_bytes)
            file.seek(begin)
            data = file.read(most_bytes)
    except FileNotFoundError:
        return []
    if begin:
        data = data.partition(b"\n")[2]
    return data[: data.rfind(b"\n") + 1].splitlines()


def tail(path: Path, *, num_lines: int, end: int | None = None) -> list[bytes]:
    """Return a file's last lines up to a byte, reading no more of it than they take."""
    size = path.stat().st_size if end is None else end
    num_bytes = _CHUNK_BYTES
    while True:
        with path.open("rb") as file:
            begin = max(0, size - num_bytes)
            file.seek(begin)
            lines = file.read(size - begin).split(b"\n")
        if not lines[-1]:
            del lines[-1]
        # The first one may be cut.
        if begin == 0 or len(lines) > num_lines:
            return lines[-num_lines:] if num_lines else []
        num_bytes *= 4


def last_line_begin(path: Path) -> int:
    """Return where a file's last whole line begins, in bytes; 0 where none is near its end."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        begin = max(0, size - _CHUNK_BYTES)
        file.seek(begin)
        data = file.read(size - begin)
    end = data.rfind(b"\n")
    if end < 0:
        return 0
    before = data.rfind(b"\n", 0, end)
    return begin + before + 1 if before >= 0 or begin == 0 else 0


def sample_lines(path: Path, *, num_lines: int) -> list[bytes]:
    """Return up to so many whole lines spread over a file, in order: the first and the last too.

    As many seeks, whatever the file's size.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            if size <= num_lines * 2048:
                file.seek(0)
                data = file.read(size)
                return data[: data.rfind(b"\n") + 1].splitlines()
            found: dict[int, bytes] = {}
            for number in range(num_lines):
                file.seek(max(0, number * size // num_lines - 1))
                if number:
                    file.readline()
                begin, line = file.tell(), file.readline()
                if line.endswith(b"\n"):
                    found[begin] = line[:-1]
    except FileNotFoundError:
        return []
    return [found[begin] for begin in sorted(found)] + last_lines(path, most_bytes=8192)[-1:]


def parse_objects(lines: list[bytes]) -> Iterator[dict[str, Any]]:
    """Parse lines of JSON, last first; what is no object is left out."""
    for line in reversed(lines):
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            yield value
