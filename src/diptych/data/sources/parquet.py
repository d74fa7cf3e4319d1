"""Read Parquet tables as Hugging Face writes them: images as bytes in the rows, or as paths.

In: a part of a source. Out: its rows, read in batches of bounded memory. Only the columns that are
understood are read, so that no other column can stop the reading.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from diptych.core.records import RawPart, RawSource
from diptych.data.reasons import Refused
from diptych.data.sources.blobs import Blob
from diptych.data.sources.cells import cell_images, image_bytes, opened, read_batches
from diptych.data.sources.columns import ColumnError, match_columns
from diptych.data.sources.row import (
    RawRow,
    Refusal,
    label_prefix,
    or_empty,
    part_store,
    refuse,
)
from diptych.data.sources.rows import is_path, show
from diptych.data.sources.turns import make_value


def read_parquet(source: RawSource, part: RawPart) -> Iterator[RawRow | Refusal]:
    """Read a part's rows in order; a file that lacks a column is refused as a whole."""
    with opened(part_store(source), file=part.path) as table:
        try:
            theirs = match_columns(table.schema_arrow.names, columns=source.columns)
        except ColumnError as error:
            yield refuse(part.path, reason="missing_column", detail=error.found, value=error.value)
            return
        yield from or_empty(_read_rows(table, theirs=theirs, source=source, part=part), part=part)


def _read_rows(
    table: Any, *, theirs: Mapping[str, str], source: RawSource, part: RawPart
) -> Iterator[RawRow | Refusal]:
    prefix = label_prefix(source, part=part)
    for start, batch in read_batches(table, columns=list(theirs.values())):
        columns = {ours: batch.column(name).to_pylist() for ours, name in theirs.items()}
        for place in range(batch.num_rows):
            number = start + place
            fields = {ours: cells[place] for ours, cells in columns.items()}
            yield _read_row(
                fields, number=number, label=f"{prefix}row-{number + 1}", source=source, part=part
            )


def _read_row(
    fields: dict[str, Any], *, number: int, label: str, source: RawSource, part: RawPart
) -> RawRow | Refusal:
    images = cell_images(fields.pop("image", None))
    try:
        blobs = tuple(
            _blob(image, name=f"row-{number + 1}-{place}", file=part.path, row=number)
            for place, image in enumerate(images)
        )
        value = make_value(fields, images=[blob.name for blob in blobs], prompt=source.prompt)
    except Refused as error:
        return refuse(label, reason=error.reason, detail=error.detail, value=error.value)
    return RawRow(label=label, value=value, blobs=blobs)


def _blob(image: Any, *, name: str, file: str, row: int) -> Blob:
    """Say where an image lies: in the row, or where its path leads."""
    path = image.get("path") if isinstance(image, dict) else image
    data = image_bytes(image)
    if data is not None:
        if isinstance(path, str) and is_path(path):
            name = path
        return Blob(name=name, file=file, offset=row, length=len(data), data=data)
    if not isinstance(path, str) or not path:
        raise Refused(
            "missing_image", detail="An image has neither bytes nor a path", value=show(image)
        )
    return Blob(name=path, file=path)
