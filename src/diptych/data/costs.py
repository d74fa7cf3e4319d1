"""`sample_costs`: what each sample costs, one table per shard, and one row per shard in a summary.

Shards and the processor flow in (`measure`); a folder flows out, with `costs.json` naming the data
and the processor it belongs to. `load_costs` reads the summary alone; a shard's columns are read
when they are asked for, and a few shards' are kept, so that memory does not grow with the samples.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from diptych.core.errors import FormatError
from diptych.core.files import inside, replacing_folder, write_text
from diptych.core.records import FORMAT_VERSION, Manifest, Shard
from diptych.core.tables import SAMPLE_COSTS
from diptych.data.measure import (
    LARGEST,
    STATUSES,
    SUMMARY,
    SUMMED,
    ShardTask,
    costs_path,
    measure_shard,
)
from diptych.data.pool import run_tasks
from diptych.data.processor import read_processor_info

__all__ = ["STATUSES", "Costs", "ShardCosts", "Totals", "load_costs", "measure"]

COSTS_NAME = "costs.json"
SUMMARY_NAME = "summary.parquet"

_CURE = "Run `kedro run --pipelines=prepare`, which measures the costs again"
_FEW_SAMPLES = 20_000
"""As many are measured sooner than processes start."""
_NUM_KEPT_SHARDS = 64


@dataclass(frozen=True, eq=False)
class ShardCosts:
    """The costs of a shard's samples, or of others; each array is [N].

    Attributes:
        num_tokens: int32, text and image tokens.
        num_label_tokens: int32.
        num_image_tokens: int32.
        num_patches: int32.
        num_images: int32.
        area_px: int64, of all images together.
        aspect: float32, width / height of the first image, 0 without one.
        usable: bool, whether a batch can take the sample; if not, the others may be 0.
    """

    num_tokens: np.ndarray
    num_label_tokens: np.ndarray
    num_image_tokens: np.ndarray
    num_patches: np.ndarray
    num_images: np.ndarray
    area_px: np.ndarray
    aspect: np.ndarray
    usable: np.ndarray


@dataclass(frozen=True)
class Totals:
    """Sums and maxima over a split's usable samples; `num_samples` counts these."""

    num_samples: int
    num_tokens: int
    squared_tokens: int
    num_label_tokens: int
    num_image_tokens: int
    num_patches: int
    max_tokens: int
    max_patches: int


class Costs:
    """The costs of one split.

    Sample numbers count over the split's shards in the manifest's order, unusable samples included.

    Attributes:
        manifest_sha256: the data they were measured on.
        processor_sha256: the processor they were measured with.
        split: 'train' or 'heldout'.
        sources: all sources of the manifest.
        shard_sources: [num_shards] int64, index into `sources`.
        shard_starts: [num_shards + 1] int64, the first sample of each shard, then their number.
        summary: [num_shards] int64 each, the columns of SUMMARY but the path.
        totals: the summary's sums over the split.
    """

    def __init__(
        self,
        *,
        manifest_sha256: str,
        processor_sha256: str,
        split: str,
        sources: tuple[str, ...],
        shard_sources: np.ndarray,
        summary: dict[str, np.ndarray],
        read: Callable[[int], ShardCosts],
    ) -> None:
        """Take the summary, and a function that reads the costs of the shard of a number."""
        self.manifest_sha256 = manifest_sha256
        self.processor_sha256 = processor_sha256
        self.split = split
        self.sources = sources
        self.shard_sources = shard_sources
        self.summary = summary
        self.shard_starts = np.cumsum([0, *summary["num_samples"]], dtype=np.int64)
        self.totals = Totals(
            num_samples=int(summary["ok"].sum()),
            **{name: int(summary[name].sum()) for name in SUMMED},
            **{name: int(summary[name].max(initial=0)) for name in LARGEST},
        )
        self._read = read
        self._kept: OrderedDict[int, ShardCosts] = OrderedDict()
        self._num_kept = _NUM_KEPT_SHARDS

    @property
    def num_samples(self) -> int:
        """Count the samples of the split, unusable ones included."""
        return int(self.shard_starts[-1])

    @property
    def num_unusable(self) -> dict[str, int]:
        """Count the samples that no batch can take, by status."""
        counts = {name: int(self.summary[name].sum()) for name in STATUSES if name != "ok"}
        return {name: count for name, count in counts.items() if count}

    def keep(self, num_shards: int) -> None:
        """Keep at least so many shards' costs once they are read."""
        self._num_kept = max(self._num_kept, num_shards)

    def shard(self, number: int) -> ShardCosts:
        """Return the costs of a shard's samples, in the shard's order."""
        if number in self._kept:
            self._kept.move_to_end(number)
        else:
            self._kept[number] = self._read(number)
            if len(self._kept) > self._num_kept:
                self._kept.popitem(last=False)
        return self._kept[number]

    def take(self, samples: np.ndarray) -> ShardCosts:
        """Return the costs of some samples.

        Args:
            samples: [N] int64, sample numbers; each shard they are of is read once.
        """
        shards = np.searchsorted(self.shard_starts, samples, side="right") - 1
        order = np.argsort(shards, kind="stable")
        present, firsts = np.unique(shards[order], return_index=True)
        columns = _empty_columns(len(samples))
        for number, places in zip(present, np.split(order, firsts[1:]), strict=False):
            costs = self.shard(int(number))
            within = samples[places] - self.shard_starts[number]
            for name, column in columns.items():
                column[places] = getattr(costs, name)[within]
        return ShardCosts(**columns)

    def column(self, name: str) -> np.ndarray:
        """Return a column of `ShardCosts` over the whole split; only figures need as much memory.

        Args:
            name: the attribute.
        """
        parts = [_empty_columns(0)[name]]
        parts += [getattr(self.shard(n), name) for n in range(len(self.shard_sources))]
        return np.concatenate(parts)


def measure(manifest: Manifest, shards: Path, processor: Path, folder: str) -> Path:
    """Measure every sample's cost, and write the `sample_costs` folder.

    A sample that cannot be encoded, or teaches nothing, gets a status; it stops nothing.

    Args:
        manifest: names the shards.
        shards: the folder they lie in.
        processor: the processor's folder.
        folder: the folder that is written, at once or not at all.
    """
    target = Path(folder)
    num_samples = sum(shard.num_samples for shard in manifest.shards)
    with replacing_folder(target) as partial:
        tasks = (
            ShardTask(shard=shard, shards=shards, processor=processor, folder=partial)
            for shard in manifest.shards
        )
        num_processes = 1 if num_samples <= _FEW_SAMPLES else None
        rows = list(run_tasks(measure_shard, tasks, num_processes=num_processes))
        pq.write_table(pa.Table.from_pylist(rows, schema=SUMMARY), partial / SUMMARY_NAME)
        identity = {
            "version": FORMAT_VERSION,
            "manifest_sha256": manifest.sha256,
            "processor_sha256": read_processor_info(processor).sha256,
        }
        text = json.dumps(identity, indent=2, sort_keys=True)
        write_text(partial / COSTS_NAME, text=text + "\n")
    return target


def load_costs(
    folder: Path, *, manifest: Manifest, split: str, processor_sha256: str | None = None
) -> Costs:
    """Read the summary of a split's costs.

    Args:
        folder: the `sample_costs` folder.
        manifest: the data that they must have been measured on.
        split: 'train' or 'heldout'.
        processor_sha256: the processor that they must have been measured with; None: any.

    Raises:
        FormatError: they were measured on other data or with another processor, or are damaged.
    """
    identity = _read_identity(folder)
    expected = {"version": FORMAT_VERSION, "manifest_sha256": manifest.sha256}
    if processor_sha256 is not None:
        expected["processor_sha256"] = processor_sha256
    for name, value in expected.items():
        if identity.get(name) != value:
            raise FormatError(
                f"The sample costs in '{folder}' have {name} {identity.get(name)}",
                allowed=f"These shards and this processor have {name} {value}",
                cure=_CURE,
            )
    listed = [shard for shard in manifest.shards if shard.split == split]
    places = {source: place for place, source in enumerate(manifest.sources)}
    return Costs(
        manifest_sha256=manifest.sha256,
        processor_sha256=identity["processor_sha256"],
        split=split,
        sources=manifest.sources,
        shard_sources=np.array([places[shard.source] for shard in listed], dtype=np.int64),
        summary=_read_summary(folder, listed=listed),
        read=_ShardReader(folder, listed),
    )


@dataclass(frozen=True)
class _ShardReader:
    """Reads the costs of the shard of a number; travels to loader workers."""

    folder: Path
    listed: list[Shard]

    def __call__(self, number: int) -> ShardCosts:
        shard = self.listed[number]
        path = inside(costs_path(shard), folder=self.folder)
        table = _read_table(path, schema=SAMPLE_COSTS)
        if table.num_rows != shard.num_samples:
            raise FormatError(
                f"'{path}' has {table.num_rows} rows",
                allowed=f"The shard has {shard.num_samples} samples",
                cure=_CURE,
            )
        names = [field.name for field in fields(ShardCosts) if field.name != "usable"]
        statuses = table["status"].to_pylist()
        usable = np.fromiter((each == "ok" for each in statuses), dtype=bool, count=len(statuses))
        columns = {name: _column(table[name], path=path) for name in names}
        return ShardCosts(**columns, usable=usable)


def _empty_columns(num_samples: int) -> dict[str, np.ndarray]:
    """Return an array for each attribute of `ShardCosts`."""
    columns: dict[str, np.ndarray] = {"usable": np.empty(num_samples, dtype=bool)}
    for field in fields(ShardCosts):
        if field.name != "usable":
            kind = SAMPLE_COSTS.field(field.name).type.to_pandas_dtype()
            columns[field.name] = np.empty(num_samples, dtype=kind)
    return columns


def _read_identity(folder: Path) -> dict[str, Any]:
    path = folder / COSTS_NAME
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise FormatError(f"There is no file '{path}'", cure=_CURE) from error
    except json.JSONDecodeError as error:
        raise FormatError(f"'{path}' is damaged: {error}", cure=_CURE) from error


def _read_summary(folder: Path, *, listed: list[Shard]) -> dict[str, np.ndarray]:
    table = _read_table(folder / SUMMARY_NAME, schema=SUMMARY)
    row_of = {path: row for row, path in enumerate(table["path"].to_pylist())}
    missing = [shard.path for shard in listed if shard.path not in row_of]
    if missing:
        raise FormatError(f"The sample costs in '{folder}' lack '{missing[0]}'", cure=_CURE)
    rows = np.array([row_of[shard.path] for shard in listed], dtype=np.int64)
    names = [name for name in SUMMARY.names if name != "path"]
    return {name: _column(table[name], path=folder / SUMMARY_NAME)[rows] for name in names}


def _column(column: pa.ChunkedArray, *, path: Path) -> np.ndarray:
    """Return a column's numbers; `to_numpy` would first import pandas (0.3 s of every start)."""
    if column.null_count:
        raise FormatError(f"'{path}' lacks {column.null_count} numbers", cure=_CURE)
    return np.from_dlpack(column.combine_chunks())


def _read_table(path: Path, *, schema: pa.Schema) -> pa.Table:
    """Read one file's columns but the key, on this thread."""
    names = [name for name in schema.names if name != "key"]
    try:
        with pq.ParquetFile(path) as file:
            if missing := set(names) - set(file.schema_arrow.names):
                raise FormatError(f"'{path}' has no column {min(missing)}", cure=_CURE)
            return file.read(columns=names, use_threads=False)
    except (OSError, pa.ArrowException) as error:
        raise FormatError(f"'{path}' cannot be read: {error}", cure=_CURE) from error
