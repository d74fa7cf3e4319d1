"""Read tables of text, with commas or (`.tsv`) tabs: a caption or an answer for each image path.

In: a part of a source. Out: its rows. A row that does not fit the header is refused alone.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from typing import BinaryIO

from diptych.core.records import RawPart, RawSource
from diptych.data.reasons import Refused
from diptych.data.sources.columns import ColumnError, match_columns
from diptych.data.sources.lines import read_lines
from diptych.data.sources.row import (
    MAX_ROW_BYTES,
    RawRow,
    Refusal,
    label_prefix,
    or_empty,
    part_store,
    refuse,
)
from diptych.data.sources.turns import make_value


class _LineTooLong(Exception):
    """A line that cannot be held, so that nothing behind it can be read either."""


def read_csv(source: RawSource, part: RawPart) -> Iterator[RawRow | Refusal]:
    """Read a part's rows in order; a file that lacks a column is refused as a whole."""
    with part_store(source).open(part.path) as file:
        csv.field_size_limit(MAX_ROW_BYTES)
        rows = csv.reader(_lines(file), delimiter="\t" if part.path.endswith(".tsv") else ",")
        try:
            header = next(rows, None)
            if header is None:
                yield from or_empty([], part=part)
                return
            theirs = match_columns(header, columns=source.columns)
            places = {ours: header.index(name) for ours, name in theirs.items()}
        except ColumnError as error:
            yield refuse(part.path, reason="missing_column", detail=error.found, value=error.value)
            return
        except (csv.Error, _LineTooLong) as error:
            yield refuse(part.path, reason="damaged_part", detail=f"No header: {error}")
            return
        found = _read_rows(rows, num_fields=len(header), places=places, source=source, part=part)
        yield from or_empty(found, part=part)


def _read_rows(
    rows: Iterator[list[str]],
    *,
    num_fields: int,
    places: Mapping[str, int],
    source: RawSource,
    part: RawPart,
) -> Iterator[RawRow | Refusal]:
    prefix, number = label_prefix(source, part=part), 0
    while True:
        label = f"{prefix}row-{number + 1}"
        try:
            row = next(rows, None)
        except csv.Error as error:
            number += 1
            yield refuse(label, reason="malformed_row", detail=f"Not CSV: {error}")
            continue
        except _LineTooLong as error:
            yield refuse(label, reason="row_too_long", detail=str(error))
            return
        if row is None:
            return
        if row:
            number += 1
            yield _read_row(
                row, label=label, num_fields=num_fields, places=places, prompt=source.prompt
            )


def _read_row(
    row: Sequence[str],
    *,
    label: str,
    num_fields: int,
    places: Mapping[str, int],
    prompt: str | None,
) -> RawRow | Refusal:
    if len(row) != num_fields:
        return refuse(
            label,
            reason="malformed_row",
            detail=f"The row has {len(row)} fields, the header {num_fields}",
            value=row,
        )
    fields = {ours: row[place] for ours, place in places.items()}
    image = fields.pop("image", "")
    try:
        value = make_value(fields, images=[image] if image else [], prompt=prompt)
    except Refused as error:
        return refuse(label, reason=error.reason, detail=error.detail, value=error.value)
    return RawRow(label=label, value=value)


def _lines(file: BinaryIO) -> Iterator[str]:
    """Decode line by line; bytes that are not UTF-8 become what no text can hold."""
    for line in read_lines(file):
        if line.text is None:
            raise _LineTooLong(f"A line is longer than {MAX_ROW_BYTES:,} bytes: the rest is unread")
        yield line.text.decode("utf-8", errors="surrogateescape")
