"""Split a file into lines, each with its place; a line too long to hold is passed over.

In: an open binary file and a range of bytes. Out: the lines that begin in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from diptych.data.sources.row import MAX_ROW_BYTES

BOM = b"\xef\xbb\xbf"
_SKIP_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Line:
    """One line without a byte order mark; `text` is None where it is longer than 64 MB."""

    offset: int
    text: bytes | None


def read_lines(file: BinaryIO, *, start: int = 0, end: int | None = None) -> Iterator[Line]:
    """Yield the lines that begin in [start, end); None: to the file's end."""
    offset = start
    if start:
        file.seek(start - 1)
        offset = start - 1 + _skip_line(file, within=None if end is None else end - start + 1)
    while end is None or offset < end:
        text = file.readline(MAX_ROW_BYTES + 1)
        if not text:
            return
        num_bytes = len(text)
        if num_bytes > MAX_ROW_BYTES:
            num_bytes += 0 if text.endswith(b"\n") else _skip_line(file)
            yield Line(offset=offset, text=None)
        else:
            yield Line(offset=offset, text=text if offset else text.removeprefix(BOM))
        offset += num_bytes


def _skip_line(file: BinaryIO, *, within: int | None = None) -> int:
    """Read to the line's end, or somewhat more than `within` bytes; return how many they were."""
    num_bytes = 0
    while (within is None or num_bytes < within) and (piece := file.readline(_SKIP_BYTES)):
        num_bytes += len(piece)
        if piece.endswith(b"\n"):
            break
    return num_bytes
