"""Find raw samples and read their rows one by one; what is in a row is `rows.py`'s business.

In: the parameters' sources. Out: `raw_samples`, and for each part of a source an iterator of rows
and of refusals, so that one bad row or file stops nothing. Knows nothing of pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from diptych.core.records import RawPart, RawSource
from diptych.data.files.store import ChangedFile, MissingFile, PathEscapes
from diptych.data.sources.csv import read_csv
from diptych.data.sources.gather import gather
from diptych.data.sources.llava import read_json
from diptych.data.sources.params import SourceParams
from diptych.data.sources.parquet import read_parquet
from diptych.data.sources.row import RawRow, Refusal, part_store, refuse
from diptych.data.sources.tars import read_tar

__all__ = ["RawRow", "Refusal", "SourceParams", "gather", "read_part"]

_READERS: dict[str, Callable[[RawSource, RawPart], Iterator[RawRow | Refusal]]] = {
    "llava": read_json,
    "parquet": read_parquet,
    "csv": read_csv,
    "webdataset": read_tar,
}


def read_part(source: RawSource, part: RawPart) -> Iterator[RawRow | Refusal]:
    """Read the rows of one part of a source, in order.

    A file that is damaged, gone or changed yields a refusal with the file's path as its label; what
    was read before it stays.

    Raises:
        DataError: A server cannot be reached, or refuses: that says nothing about the data.
    """
    store = part_store(source)
    try:
        before = store.stat(part.path)
        if part.end is not None and before.num_bytes != part.num_bytes:
            raise ChangedFile(f"'{part.path}' has changed since its lines were counted: run again")
        yield from _READERS[source.kind](source, part)
        if store.stat(part.path) != before:
            raise ChangedFile(f"'{part.path}' changed while it was read: run again")
    except (ChangedFile, MissingFile, PathEscapes) as error:
        yield refuse(part.path, reason="damaged_part", value=part.path, detail=error.found)
