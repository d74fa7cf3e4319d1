"""Part the sample index into shards, from a few of its columns and without holding it.

In: `sample_index` and when a shard is full. Out: for each shard the rows that it holds. Nothing is
read of texts or images: their sizes are in the index.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import Field

from diptych.core.records import Section

Split = Literal["train", "heldout"]
_PLANNED_COLUMNS = ("source", "split", "image_lengths", "text_bytes")
_BATCH_ROWS = 65_536
_READ_ROWS = 1_024


class ShardParams(Section):
    """When a shard is full, whichever comes first; and how many processes write shards."""

    max_samples: int = Field(default=500, ge=1)
    max_bytes: int = Field(default=512 * 1024**2, ge=1)
    num_processes: int | None = Field(default=None, ge=1)


@dataclass(slots=True)
class Span:
    """Rows [start, stop) of one part of the index."""

    part: str
    start: int
    stop: int


@dataclass(slots=True)
class Cut:
    """One shard to be: the rows of its split and source within its spans."""

    split: Split
    source: str
    number: int
    spans: list[Span] = field(default_factory=list)
    num_samples: int = 0
    num_bytes: int = 0

    def take(self, rows: np.ndarray, *, num_bytes: int, part: str) -> None:
        """Add rows of a part, [n] ascending row numbers."""
        if not self.spans or self.spans[-1].part != part:
            self.spans.append(Span(part=part, start=int(rows[0]), stop=0))
        self.spans[-1].stop = int(rows[-1]) + 1
        self.num_samples += len(rows)
        self.num_bytes += num_bytes


def cut(sample_index: Path, *, params: ShardParams) -> Iterator[Cut]:
    """Part samples into shards, in the index's order; only the open shards are held.

    A sample counts the bytes of its images and of its text; one that is larger than a shard has
    one to itself.
    """
    open_cuts: dict[tuple[Split, str], Cut] = {}
    for part, first_row, batch in _read_sizes(sample_index):
        sizes = _sizes(batch)
        for key, rows in _groups(batch):
            at = 0
            while at < len(rows):
                current = open_cuts.setdefault(key, Cut(*key, number=0))
                count = _fitting(current, sizes=sizes[rows[at:]], params=params)
                if count == 0:
                    yield current
                    open_cuts[key] = Cut(*key, number=current.number + 1)
                    continue
                chosen = rows[at : at + count]
                total = int(sizes[chosen].sum())
                current.take(first_row + chosen, num_bytes=total, part=part)
                at += count
    yield from open_cuts.values()


def read_rows(
    sample_index: Path, *, chosen: Cut, columns: Iterable[str]
) -> Iterator[dict[str, Any]]:
    """Read the index's rows of one shard, a few at a time."""
    for span in chosen.spans:
        with pq.ParquetFile(sample_index / span.part) as file:
            groups, at = _row_groups(file, span=span)
            names = [*columns, "split", "source"]
            for batch in file.iter_batches(_READ_ROWS, row_groups=groups, columns=names):
                first = max(span.start - at, 0)
                inside = batch.slice(first, max(span.stop - at - first, 0))
                for key, rows in _groups(inside):
                    if key == (chosen.split, chosen.source):
                        yield from inside.take(pa.array(rows)).to_pylist()
                at += batch.num_rows
                if at >= span.stop:
                    break


def _read_sizes(sample_index: Path) -> Iterator[tuple[str, int, pa.RecordBatch]]:
    """Yield batches of the planning columns, each with its part and its first row's number."""
    for path in sorted(sample_index.rglob("*.parquet")):
        at = 0
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(_BATCH_ROWS, columns=list(_PLANNED_COLUMNS)):
                yield path.relative_to(sample_index).as_posix(), at, batch
                at += batch.num_rows


def _groups(batch: pa.RecordBatch) -> Iterator[tuple[tuple[Split, str], np.ndarray]]:
    """Yield each split and source with the numbers of its rows, ascending."""
    splits, sources = batch["split"].dictionary_encode(), batch["source"].dictionary_encode()
    split_codes, source_codes = splits.indices.to_numpy(), sources.indices.to_numpy()
    for split_code, split in enumerate(splits.dictionary.to_pylist()):
        for source_code, source in enumerate(sources.dictionary.to_pylist()):
            chosen = (split_codes == split_code) & (source_codes == source_code)
            yield (split, source), np.flatnonzero(chosen)


def _sizes(batch: pa.RecordBatch) -> np.ndarray:
    """Sum what each sample's images and text take, [rows] int64 bytes."""
    lengths = batch["image_lengths"]
    counts = lengths.value_lengths().to_numpy()
    totals = np.concatenate([[0], np.cumsum(lengths.flatten().to_numpy())]).astype(np.int64)
    ends = np.cumsum(counts)
    return totals[ends] - totals[ends - counts] + batch["text_bytes"].to_numpy()


def _fitting(current: Cut, *, sizes: np.ndarray, params: ShardParams) -> int:
    """Count how many of the next samples still fit; an empty shard takes one of any size."""
    totals = np.cumsum(sizes[: params.max_samples - current.num_samples])
    count = int(np.searchsorted(totals, params.max_bytes - current.num_bytes, side="right"))
    return count or int(not current.num_samples)


def _row_groups(file: pq.ParquetFile, *, span: Span) -> tuple[list[int], int]:
    """Return the row groups that hold a span, and the number of their first row."""
    counts = [file.metadata.row_group(n).num_rows for n in range(file.num_row_groups)]
    ends = np.cumsum(counts)
    first = int(np.searchsorted(ends, span.start, side="right"))
    last = int(np.searchsorted(ends, span.stop, side="left"))
    return list(range(first, last + 1)), int(ends[first]) - counts[first]
