"""The two kinds of files that indexing writes: tables of unfinished work, and parts of the index.

In: tables. Out: Arrow files without compression for what is read again at once and then deleted,
Parquet for what stays. Layout and compression are fixed: equal rows give equal bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.ipc as ipc
import pyarrow.parquet as pq

from diptych.core.files import replacing

_PLAIN = ["source", "image_formats.list.element", "status", "kinds.list.element"]
"""The columns of few values; a dictionary of the others would only cost time."""


def write_work(path: Path, *, tables: Iterable[pa.Table], schema: pa.Schema) -> int:
    """Write a table of unfinished work, a batch for each table; return its number of rows."""
    num_rows = 0
    with (
        replacing(path) as partial,
        pa.OSFile(str(partial), "wb") as file,
        ipc.new_file(file, schema) as writer,
    ):
        for table in tables:
            num_rows += table.num_rows
            writer.write_table(table)
    return num_rows


@contextmanager
def opened_work(
    path: Path, *, columns: Sequence[str] | None = None
) -> Iterator[ipc.RecordBatchFileReader]:
    """Open a table of unfinished work; of other columns than these nothing is read."""
    with pa.OSFile(str(path)) as file:
        options = ipc.IpcReadOptions()
        if columns is not None:
            with ipc.open_file(file) as whole:
                options.included_fields = sorted(map(whole.schema.get_field_index, columns))
            file.seek(0)
        with ipc.open_file(file, options=options) as reader:
            yield reader


def read_work(path: Path, *, columns: Sequence[str] | None = None) -> pa.Table:
    """Read a table of unfinished work."""
    with opened_work(path, columns=columns) as reader:
        return reader.read_all()


class ParquetFile:
    """A Parquet file in the making."""

    def __init__(self, path: Path, *, schema: pa.Schema) -> None:
        self._writer = pq.ParquetWriter(
            path,
            schema,
            version="2.6",
            compression="zstd",
            compression_level=1,
            use_dictionary=_PLAIN,  # type: ignore[arg-type] # the stubs know only booleans
            write_statistics=False,
        )

    def write(self, table: pa.Table) -> None:
        """Add a table as one row group."""
        self._writer.write_table(table, row_group_size=max(table.num_rows, 1))

    def __enter__(self) -> ParquetFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._writer.close()
