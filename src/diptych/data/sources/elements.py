"""Split a JSON array into the texts of its elements, one at a time in memory.

In: an open binary file whose text begins with `[`. Out: the text of each element, not parsed, so
that a broken one can be refused alone; one too long to hold is passed over.

Differs: `ijson` stops at the first fault, takes time by the square of a string's length and memory
by the square of the nesting. Here every byte is looked at once: an element ends at a comma or
bracket that is outside of strings and of inner brackets.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import BinaryIO

from diptych.data.files.store import ChangedFile
from diptych.data.sources.lines import Line
from diptych.data.sources.row import MAX_ROW_BYTES

_CHUNK_BYTES = 1 << 20
_TO_STRING_END = re.compile(rb'(?:[^"\\]++|\\.)*+"', re.DOTALL)
_TO_SIGN = {
    within: re.compile(rb'(?:[^"%b]++|"(?:[^"\\]++|\\.)*+")*+(["%b])' % (signs, signs), re.DOTALL)
    for within, signs in (("array", rb"\[\]{},"), ("element", rb"\[\]{}"))
}
"""Pass over text and whole strings to the next sign; a quote is one where its string is cut off."""


def read_elements(file: BinaryIO) -> Iterator[Line]:
    """Yield the elements of an array, each with its offset.

    Raises:
        ChangedFile: The file ends before the array does, or goes on behind it.
    """
    held = _Held()
    depth, in_string, skipped, offset = 0, False, 0, 0
    while chunk := file.read(_CHUNK_BYTES):
        at, begin, skipped = skipped, 0, 0
        while True:
            if in_string:
                found = _TO_STRING_END.match(chunk, at)
                if found is None:
                    skipped = _count_skipped(chunk[at:])
                    break
                at, in_string = found.end(), False
            found = _TO_SIGN["array" if depth == 1 else "element"].match(chunk, at)
            if found is None:
                break
            at, sign = found.end(), found[1]
            if sign == b'"':
                in_string = True
            elif sign in b"[{":
                depth += 1
                begin = at if depth == 1 else begin
            elif depth > 1:
                depth -= 1
            else:
                yield from held.take(
                    chunk[begin : at - 1], end=offset + at - 1, is_last=sign != b","
                )
                begin = at
                if sign != b",":
                    _check_end(chunk[at:], file=file)
                    return
        held.add(chunk[begin:] if depth else b"")
        offset += len(chunk)
    raise ChangedFile("The file ends in the middle of its array: it is cut off, or a quote is lost")


class _Held:
    """What was read of the element that is not complete yet."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._num_bytes = 0

    def add(self, piece: bytes) -> None:
        self._num_bytes += len(piece)
        if self._num_bytes > MAX_ROW_BYTES:
            self._pieces = []
        else:
            self._pieces.append(piece)

    def take(self, piece: bytes, *, end: int, is_last: bool) -> Iterator[Line]:
        """Yield the element that ends here; an array may end in a comma, or have no element."""
        self.add(piece)
        start, is_long = end - self._num_bytes, self._num_bytes > MAX_ROW_BYTES
        text = b"".join(self._pieces)
        self._pieces, self._num_bytes = [], 0
        if is_long or text.strip() or not is_last:
            yield Line(offset=start, text=None if is_long else text)


def _count_skipped(rest: bytes) -> int:
    """Tell how many bytes of the next chunk are escaped by the last of this one: none, or one."""
    return (len(rest) - len(rest.rstrip(b"\\"))) % 2


def _check_end(rest: bytes, *, file: BinaryIO) -> None:
    while rest:
        if rest.strip():
            raise ChangedFile("Something stands behind the array's end; it is not read")
        rest = file.read(_CHUNK_BYTES)
