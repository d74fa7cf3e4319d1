"""Read annotations in JSON: one array, or one row a line.

In: a part of a source. Out: its rows. A bad line is refused alone; an array larger than 64 MB is
streamed. Images written into a row as `data:` addresses are found again by the line's offset.
Knows nothing of what a conversation is.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import BinaryIO

from diptych.core.records import RawPart, RawSource
from diptych.data.files.store import ChangedFile
from diptych.data.reasons import Refused
from diptych.data.sources.blobs import Blob, is_inline, read_inline
from diptych.data.sources.elements import read_elements
from diptych.data.sources.lines import BOM, Line, read_lines
from diptych.data.sources.row import (
    MAX_ROW_BYTES,
    RawRow,
    Refusal,
    label_prefix,
    or_empty,
    part_store,
    refuse,
)
from diptych.data.sources.rows import read_image_paths

LINE_SUFFIXES = (".jsonl", ".ndjson")
_HEAD_BYTES = 4096
_INLINE = b'"data:'


def is_array(path: str, *, head: bytes) -> bool:
    """Tell a JSON array from a file of lines, by its name and its first bytes."""
    if PurePosixPath(path).suffix.lower() in LINE_SUFFIXES:
        return False
    return head.removeprefix(BOM).lstrip().startswith(b"[")


def read_json(source: RawSource, part: RawPart) -> Iterator[RawRow | Refusal]:
    """Read a part's rows in order.

    A file whose name ends in `.jsonl` or `.ndjson`, or whose text does not start with `[`, is read
    line by line, and a bad line is refused alone. So is a small array that has one row a line.
    """
    prefix = label_prefix(source, part=part)
    with part_store(source).open(part.path) as file:
        head = file.read(_HEAD_BYTES)
        file.seek(0)
        if not is_array(part.path, head=head):
            rows = _read_lines(file, part=part, prefix=prefix)
        elif part.num_bytes > MAX_ROW_BYTES:
            rows = _stream_array(file, prefix=prefix)
        else:
            rows = _read_array(file, part=part, prefix=prefix)
        yield from or_empty(rows, part=part)


def _read_lines(file: BinaryIO, *, part: RawPart, prefix: str) -> Iterator[RawRow | Refusal]:
    """Read one row a line; a line is known by its number, in a long file's pieces by its offset."""
    cut = part.start > 0 or part.end is not None
    for number, line in enumerate(read_lines(file, start=part.start, end=part.end), start=1):
        label = f"{prefix}byte-{line.offset}" if cut else f"{prefix}line-{number}"
        if line.text is None or line.text.strip():
            yield _read_line(line, label=label, path=part.path)


def _read_line(line: Line, *, label: str, path: str) -> RawRow | Refusal:
    if line.text is None:
        return _too_long(label)
    row = _parse(line.text, label=label)
    if isinstance(row, Refusal) or _INLINE not in line.text:
        return row
    return _with_inline(row, path=path, offset=line.offset)


def _parse(text: bytes, *, label: str) -> RawRow | Refusal:
    try:
        return RawRow(label=label, value=json.loads(text.decode("utf-8")))
    except (ValueError, RecursionError) as error:
        return refuse(
            label,
            reason="malformed_json",
            value=text.strip(),
            detail=f"{label.rpartition(':')[2].capitalize()} is not valid JSON: {error}",
        )


def _with_inline(row: RawRow, *, path: str, offset: int) -> RawRow | Refusal:
    """Say where the bytes of `data:` images lie: in the line at this offset."""
    try:
        blobs = tuple(
            _inline_blob(image, name=f"data-{place}", path=path, offset=offset)
            if is_inline(image)
            else Blob(name=image, file=image)
            for place, image in enumerate(read_image_paths(row.value))
        )
    except Refused as error:
        return refuse(row.label, reason=error.reason, detail=error.detail, value=error.value)
    return RawRow(label=row.label, value=row.value, blobs=blobs)


def _inline_blob(image: str, *, name: str, path: str, offset: int) -> Blob:
    data = read_inline(image)
    return Blob(name=name, file=path, offset=offset, length=len(data), data=data)


def _read_array(file: BinaryIO, *, part: RawPart, prefix: str) -> Iterator[RawRow | Refusal]:
    content = file.read(MAX_ROW_BYTES + 1)
    if len(content) > MAX_ROW_BYTES:
        yield refuse(part.path, reason="damaged_part", detail="The file grew while it was read")
        return
    try:
        rows = json.loads(content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        yield from _recover(content, part=part, prefix=prefix, error=error)
        return
    inline = _INLINE in content
    for number, value in enumerate(rows, start=1):
        row = RawRow(label=f"{prefix}row-{number}", value=value)
        yield _without_inline(row) if inline else row


def _without_inline(row: RawRow) -> RawRow | Refusal:
    """Refuse a row of an array with `data:` images: no offset says where they are."""
    try:
        images = read_image_paths(row.value)
    except Refused:
        return row  # whoever parses it refuses it
    inline = next((image for image in images if is_inline(image)), None)
    if inline is None:
        return row
    return refuse(
        row.label,
        reason="unreadable_image",
        value=inline,
        detail="An image is written into the row, which is read in JSONL only, not in an array",
    )


def _recover(
    content: bytes, *, part: RawPart, prefix: str, error: ValueError | RecursionError
) -> Iterator[RawRow | Refusal]:
    """Read a broken array line by line, if at least half of its lines are whole rows.

    Else element by element; where it is cut off, one refusal stands for what is missing.
    """
    rows = _read_array_lines(content.splitlines(), prefix=prefix)
    num_whole = _count_whole(rows)
    if num_whole and num_whole * 2 >= len(rows):
        yield from rows
        return
    elements, is_cut = _read_elements(content, prefix=prefix)
    num_whole = _count_whole(elements)
    if num_whole:
        yield from elements
    if is_cut or not num_whole:
        yield refuse(
            part.path,
            reason="damaged_part",
            value=part.path,
            detail=f"'{part.path}' is not a valid JSON array: {error}. Rows before the damage are "
            "used; in JSONL a bad line is set aside alone",
        )


def _read_array_lines(lines: list[bytes], *, prefix: str) -> list[RawRow | Refusal]:
    """Read an array that has one row a line."""
    found: list[RawRow | Refusal] = []
    for number, line in enumerate(lines, start=1):
        text = line.removeprefix(BOM) if number == 1 else line
        text = text.strip().rstrip(b",")
        if number == 1:
            text = text.removeprefix(b"[")
        if number == len(lines):
            text = text.removesuffix(b"]")
        if text and text not in (b"[", b"]"):
            found.append(_parse(text, label=f"{prefix}line-{number}"))
    return found


def _count_whole(rows: list[RawRow | Refusal]) -> int:
    return sum(isinstance(row, RawRow) and isinstance(row.value, dict) for row in rows)


def _read_elements(content: bytes, *, prefix: str) -> tuple[list[RawRow | Refusal], bool]:
    """Return the elements of a broken array, and whether it is cut off."""
    elements: list[RawRow | Refusal] = []
    try:
        for row in _stream_array(io.BytesIO(content.removeprefix(BOM)), prefix=prefix):
            elements.append(row)
    except ChangedFile:
        return elements, True
    return elements, False


def _stream_array(file: BinaryIO, *, prefix: str) -> Iterator[RawRow | Refusal]:
    """Read a large array row by row; a broken row is refused alone."""
    for number, element in enumerate(read_elements(file), start=1):
        label = f"{prefix}row-{number}"
        if element.text is None:
            yield _too_long(label)
            continue
        row = _parse(element.text, label=label)
        if isinstance(row, RawRow) and _INLINE in element.text:
            row = _without_inline(row)
        yield row


def _too_long(label: str) -> Refusal:
    return refuse(
        label,
        reason="row_too_long",
        value=f"more than {MAX_ROW_BYTES:,} bytes",
        detail=f"A row may have {MAX_ROW_BYTES:,} bytes",
    )
