"""Rows of a Parquet file in batches of bounded memory, and one image of one row.

In: a store and a file of it. Out: batches of some columns, each with its first row's number. Knows
nothing of conversations.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from diptych.core.errors import DataError
from diptych.data.files.store import ChangedFile, Store

_BATCH_BYTES = 32 << 20
_MAX_BATCH_ROWS = 4096
_BUFFER_BYTES = 1 << 20


@contextmanager
def opened(store: Store, *, file: str) -> Iterator[pq.ParquetFile]:
    """Open a Parquet file; whatever Arrow raises while it is open becomes `ChangedFile`.

    Raises:
        ChangedFile: It is damaged.
        MissingFile, PathEscapes, DataError: As `Store.stat`.
    """
    store.stat(file)
    try:
        # With a buffer, pages are read one by one; without, all of a row group's column at once.
        with pq.ParquetFile(
            store.local(file) or store.open(file), buffer_size=_BUFFER_BYTES, pre_buffer=False
        ) as table:
            yield table
    except DataError:
        raise
    except (pa.ArrowException, OSError, ValueError, LookupError, OverflowError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ChangedFile(f"'{file}' cannot be read as Parquet: {reason}") from error


def read_batches(
    table: pq.ParquetFile, *, columns: Sequence[str], first_row: int = 0
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield batches of about 32 MB with the number of their first row.

    A page is read whole: where the writer made pages larger than that, as `datasets` does of a
    hundred images, memory is bounded by them.

    Args:
        table: An open file.
        columns: Which top-level columns to read.
        first_row: Row groups before this row's are passed over.
    """
    start = 0
    for number in range(table.metadata.num_row_groups):
        group = table.metadata.row_group(number)
        if start + group.num_rows > first_row:
            at = start
            size = _batch_rows(group)
            for batch in table.iter_batches(
                size, row_groups=[number], columns=list(columns), use_threads=False
            ):
                yield at, batch
                at += batch.num_rows
        start += group.num_rows


def image_column(names: Sequence[str], *, columns: Mapping[str, str]) -> str | None:
    """Return the column that holds the images; None where there is none."""
    for name in ("images", "image"):
        if columns.get(name, name) in names:
            return columns.get(name, name)
    return None


def cell_images(cell: Any) -> list[Any]:
    """Return a cell's images, each bytes, a path, or a struct of both."""
    if cell is None:
        return []
    return list(cell) if isinstance(cell, list) else [cell]


def image_bytes(image: Any) -> bytes | None:
    """Return the bytes in one entry of an image cell; None where it has only a path."""
    found = image.get("bytes") if isinstance(image, dict) else image
    return found if isinstance(found, bytes) else None


class Cells:
    """The images of one Parquet file by row and place; cheap when rows are asked for in order."""

    def __init__(self, store: Store, *, file: str, columns: Mapping[str, str]) -> None:
        self.file = file
        self._store = store
        self._columns = columns
        self._start = 0
        self._cells: list[Any] = []
        self._batches = self._read_from(0)

    def read(self, row: int, *, place: int) -> bytes:
        """Read one image.

        Raises:
            ChangedFile: The file is damaged, or holds no such image.
            MissingFile, PathEscapes, DataError: As `Store.stat`.
        """
        if not self._start <= row < self._start + len(self._cells):
            self._advance(row)
        images = cell_images(self._cells[row - self._start])
        data = image_bytes(images[place]) if place < len(images) else None
        if data is None:
            raise ChangedFile(f"'{self.file}' has changed: row {row} has no image {place}")
        return data

    def _advance(self, row: int) -> None:
        # A row not far ahead is in one of the next batches; others are looked up by row group.
        if not 0 <= row - self._start - len(self._cells) < _MAX_BATCH_ROWS:
            self._batches = self._read_from(row)
        for start, cells in self._batches:
            self._start, self._cells = start, cells
            if row < start + len(cells):
                return
        raise ChangedFile(f"'{self.file}' has changed: it has no row {row}")

    def _read_from(self, row: int) -> Iterator[tuple[int, list[Any]]]:
        with opened(self._store, file=self.file) as table:
            column = image_column(table.schema_arrow.names, columns=self._columns)
            if column is None:
                raise ChangedFile(f"'{self.file}' has changed: it has no column of images")
            for start, batch in read_batches(table, columns=[column], first_row=row):
                yield start, batch.column(0).to_pylist()


def _batch_rows(group: pq.RowGroupMetaData) -> int:
    """Return how many rows make a batch.

    Differs: the size is that of all columns. Arrow's records of single columns end the process
    where a damaged file's statistics do not fit (pyarrow 26).
    """
    per_row = max(1, group.total_byte_size // max(1, group.num_rows))
    return max(1, min(_MAX_BATCH_ROWS, _BATCH_BYTES // per_row))
