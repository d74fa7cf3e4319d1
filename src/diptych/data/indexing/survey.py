"""Examine one part of a source and write down what was found, in a process of its own if need be.

In: a part, or some of its rows. Out: two Arrow files below a folder of unfinished work, named after
everything that decides them: the usable rows (`SURVEY`) and the refused ones
(`core.tables.QUARANTINE`). What has its files already is not examined again. Knows nothing of other
parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, islice
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import xxhash

from diptych.core.hashing import canonical_json, xxh3_bytes
from diptych.core.records import RawPart, RawSource
from diptych.core.tables import QUARANTINE, SAMPLE_INDEX
from diptych.data.indexing.examine import Examined, Examiner, IndexParams
from diptych.data.indexing.files import opened_work, write_work
from diptych.data.reasons import Refused
from diptych.data.sources import read_part
from diptych.data.sources.row import RawRow, Refusal
from diptych.data.sources.rows import read_id

Item = TypeVar("Item")

SURVEY = pa.schema(
    [
        *(column for column in SAMPLE_INDEX if column.name != "split"),
        ("key_hash", pa.binary(16)),  # xxh3_128 of the key
        ("label", pa.string()),  # the row's place in its part
    ]
)

_SEEN_COLUMNS = (
    "image_names",
    "image_files",
    "image_offsets",
    "image_lengths",
    "image_formats",
    "widths_px",
    "heights_px",
    "image_hashes",
)
"""The columns of `Seen`, in its order."""

_VERSION = 2
_ROWS_PER_GROUP = 4096
_ROWS_PER_PIECE = 2048
_MIN_CUT_BYTES = 512 * 1024
_ENOUGH_PARTS = 16
_MAX_VALUE_CHARS = 200
_LATER = frozenset({"max_quarantined_fraction", "duplicates", "leakage", "num_processes"})
"""Parameters that do not matter here."""


@dataclass(frozen=True, slots=True)
class Survey:
    """One part, or a piece of it, to examine; of `source.parts` only the first and last travel.

    `rows` is the table of usable rows, `refused` that of refused ones, which is written last.
    `raw` is the piece's rows; None: they are read from the part.
    """

    source: RawSource
    part: RawPart
    params: IndexParams
    rows: Path
    refused: Path
    raw: tuple[RawRow | Refusal, ...] | None = None

    @property
    def is_done(self) -> bool:
        """Whether both tables are there."""
        return self.rows.exists() and self.refused.exists()


def plan_surveys(
    source: RawSource, *, part: RawPart, params: IndexParams, folder: Path
) -> Iterator[Survey]:
    """Plan what is examined of a part at a time: all of it, or pieces where that is worth it.

    Rows that only name their images take long to examine, but not to read: they are read here, once
    for all pieces. The source alone decides on pieces: many parts are enough by themselves.
    """
    ends = source.model_copy(update={"parts": (*source.parts[:1], *source.parts[-1:])})
    values = (ends.model_dump(mode="json"), part.model_dump(mode="json"))
    limits = params.model_dump(mode="json", exclude=set(_LATER))
    stem = xxh3_bytes(canonical_json([_VERSION, *values, limits]).encode())
    names_images = source.kind in ("llava", "csv")  # others hold them
    is_whole = part.end is None and part.num_bytes >= _MIN_CUT_BYTES
    if not (names_images and is_whole and len(source.parts) < _ENOUGH_PARTS):
        yield Survey(ends, part, params, *_files(folder, stem=stem))
        return
    for number, rows in enumerate(_batches(read_part(ends, part), size=_ROWS_PER_PIECE)):
        piece = Survey(ends, part, params, *_files(folder, stem=f"{stem}-{number:06d}"))
        yield replace(piece, raw=() if piece.is_done else tuple(rows))


def _files(folder: Path, *, stem: str) -> tuple[Path, Path]:
    return folder / f"{stem}.rows.arrow", folder / f"{stem}.refused.arrow"


def survey(task: Survey) -> int:
    """Examine a part, unless that is done, and return how many rows can be used."""
    if task.is_done:
        with opened_work(task.rows, columns=["key"]) as reader:
            return sum(
                reader.get_batch(number).num_rows for number in range(reader.num_record_batches)
            )
    refused: list[dict[str, Any]] = []
    tables = _to_tables(_examine(task, refused=refused), source=task.source.name)
    num_rows = write_work(task.rows, tables=tables, schema=SURVEY)
    found = pa.Table.from_pylist(refused, schema=QUARANTINE)
    write_work(task.refused, tables=[found], schema=QUARANTINE)
    return num_rows


def printable(text: str) -> str:
    """Cut a value and replace what UTF-8 cannot hold."""
    return text[:_MAX_VALUE_CHARS].encode("utf-8", errors="replace").decode("utf-8")


def _examine(task: Survey, *, refused: list[dict[str, Any]]) -> Iterator[Examined]:
    """Yield usable rows; add the others to `refused`."""
    examiner = Examiner(task.source, params=task.params)
    for raw in read_part(task.source, task.part) if task.raw is None else task.raw:
        if isinstance(raw, Refusal):
            error = Refused(raw.reason, detail=raw.detail, value=raw.value)
            refused.append(_quarantine_row(raw, source=task.source.name, error=error))
            continue
        try:
            yield examiner.examine(raw)
        except Refused as error:
            refused.append(_quarantine_row(raw, source=task.source.name, error=error))


def _quarantine_row(raw: RawRow | Refusal, *, source: str, error: Refused) -> dict[str, Any]:
    name = read_id(raw.value) if isinstance(raw, RawRow) else None
    return {
        "key": printable(f"{source}/{name or raw.label}"),
        "source": source,
        "reason": error.reason,
        "value": printable(error.value),
        "detail": f"{printable(raw.label)}: {printable(error.detail)}",
        "image_path": error.image_path,
        "image_file": error.image_file,
        "image_offset": error.image_offset,
        "image_length": error.image_length,
    }


def _batches(rows: Iterator[Item], *, size: int) -> Iterator[list[Item]]:
    while batch := list(islice(rows, size)):
        yield batch


def _to_tables(rows: Iterator[Examined], *, source: str) -> Iterator[pa.Table]:
    batch = _Batch(source)
    for row in rows:
        batch.add(row)
        if batch.num_rows == _ROWS_PER_GROUP:
            yield batch.to_table()
            batch = _Batch(source)
    if batch.num_rows:
        yield batch.to_table()


class _Batch:
    """Rows on their way into a table, one cell after another.

    Python's garbage collector goes through all records that live, again and again; through flat
    lists of texts and numbers it need not, and it was a tenth of all time.
    """

    def __init__(self, source: str) -> None:
        self._source = source
        self._cells: list[Any] = []
        self._image_cells: list[Any] = []
        self._num_images: list[int] = []

    @property
    def num_rows(self) -> int:
        return len(self._num_images)

    def add(self, row: Examined) -> None:
        *cells, images = row
        self._cells += cells
        self._num_images.append(len(images))
        for image in images:
            self._image_cells += image

    def to_table(self) -> pa.Table:
        """Turn cells into columns; lists of images are flat columns with one array of offsets."""
        width = len(Examined._fields) - 1
        labels, keys, messages, text_bytes, content_hashes, kinds = (
            self._cells[place::width] for place in range(width)
        )
        columns: dict[str, Any] = {
            "key": keys,
            "source": pa.repeat(self._source, self.num_rows),
            "messages": messages,
            "text_bytes": text_bytes,
            "content_hash": content_hashes,
            "status": pa.repeat("ok", self.num_rows),
            "key_hash": [xxhash.xxh3_128_digest(key.encode()) for key in keys],
            "label": labels,
            "kinds": _lists(list(chain(*kinds)), starts=_starts(map(len, kinds)), name="kinds"),
        }
        starts = _starts(self._num_images)
        for place, name in enumerate(_SEEN_COLUMNS):
            values = self._image_cells[place :: len(_SEEN_COLUMNS)]
            columns[name] = _lists(values, starts=starts, name=name)
        return pa.table([pa.array(columns[c.name], c.type) for c in SURVEY], schema=SURVEY)


def _starts(lengths: Iterable[int]) -> pa.Array:
    return pa.array(accumulate(lengths, initial=0), pa.int32())


def _lists(values: Sequence[Any], *, starts: pa.Array, name: str) -> pa.Array:
    kind = SURVEY.field(name).type
    return pa.ListArray.from_arrays(starts, pa.array(values, kind.value_type), type=kind)
