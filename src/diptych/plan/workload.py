"""What the training data asks of a micro-batch: sample_costs and the schedule in, counts out.

Only sums and maxima are kept, so that a plan needs no sample in memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from diptych.core.errors import FormatError
from diptych.core.records import ScheduleSpec
from diptych.core.tables import SAMPLE_COSTS
from diptych.shape.counts import BatchCounts

_COLUMNS = ("num_tokens", "num_label_tokens", "num_patches", "num_images", "status")
_NUM_LARGEST = 4096
"""Of the samples with most patches and labels, so many are kept; a larger batch repeats them."""


@dataclass
class Workload:
    """Sums and maxima over the samples of a split that a batch can take.

    Attributes:
        num_samples: how many.
        num_tokens: of all together.
        squared_tokens: the sum of squares.
        num_label_tokens: of all together.
        num_patches: of all together.
        squared_patches: summed over images; a sample's images count as alike.
        max_tokens: of the longest.
        largest_patches: [at most 4096] int64 of the samples with most, falling.
        largest_labels: [at most 4096] int64 of the samples with most, falling.
        patches_per_token: of the sample with most.
        labels_per_token: of the sample with most.
    """

    num_samples: int
    num_tokens: int
    squared_tokens: int
    num_label_tokens: int
    num_patches: int
    squared_patches: float
    max_tokens: int
    largest_patches: np.ndarray
    largest_labels: np.ndarray
    patches_per_token: float
    labels_per_token: float

    def heaviest(self, num_rows: int, *, schedule: ScheduleSpec) -> BatchCounts:
        """Bound what a micro-batch of that many rows can ask.

        In mode `bucket` every row is padded to the longest sample, and has one of those with most
        patches and labels; in mode `pack` every row is full of the samples densest in them.
        """
        longest = min(self.max_tokens, schedule.max_row_tokens)
        patches = _repeat(self.largest_patches, count=num_rows)
        labels = _repeat(self.largest_labels, count=num_rows)
        if schedule.mode == "pack":
            longest = schedule.max_row_tokens
            patches = np.full(num_rows, math.ceil(self.patches_per_token * longest))
            labels = np.full(num_rows, math.ceil(self.labels_per_token * longest))
        if schedule.max_row_patches is not None:
            patches = np.minimum(patches, schedule.max_row_patches)
        # A packed row's patches are of several images, none larger than the largest sample.
        per_image = np.minimum(patches, self.largest_patches[0])
        return BatchCounts(
            num_tokens=num_rows * longest,
            squared_tokens=num_rows * longest**2,
            num_patches=int(patches.sum()),
            squared_patches=int((patches * per_image).sum()),
            num_head_tokens=int(labels.sum()),
        )

    def mean(self, num_rows: int, *, schedule: ScheduleSpec) -> BatchCounts:
        """Describe that many average rows: samples without padding, or rows that are full."""
        scale = num_rows / self.num_samples
        tokens, squared = scale * self.num_tokens, scale * self.squared_tokens
        if schedule.mode == "pack":
            scale = num_rows / self._num_packed(schedule)
            tokens = num_rows * schedule.max_row_tokens
            squared = num_rows * schedule.max_row_tokens**2
        return BatchCounts(
            num_tokens=round(tokens),
            squared_tokens=round(squared),
            num_patches=round(scale * self.num_patches),
            squared_patches=round(scale * self.squared_patches),
            num_head_tokens=round(scale * self.num_label_tokens),
        )

    def _num_packed(self, schedule: ScheduleSpec) -> float:
        """Count the rows that all samples fill, by the scarcer budget."""
        by_tokens = self.num_tokens / schedule.max_row_tokens
        if schedule.max_row_patches is None:
            return by_tokens
        return max(by_tokens, self.num_patches / schedule.max_row_patches)

    def __add__(self, other: Workload) -> Workload:
        """Put the samples of both together."""
        return Workload(
            num_samples=self.num_samples + other.num_samples,
            num_tokens=self.num_tokens + other.num_tokens,
            squared_tokens=self.squared_tokens + other.squared_tokens,
            num_label_tokens=self.num_label_tokens + other.num_label_tokens,
            num_patches=self.num_patches + other.num_patches,
            squared_patches=self.squared_patches + other.squared_patches,
            max_tokens=max(self.max_tokens, other.max_tokens),
            largest_patches=_largest(self.largest_patches, other.largest_patches),
            largest_labels=_largest(self.largest_labels, other.largest_labels),
            patches_per_token=max(self.patches_per_token, other.patches_per_token),
            labels_per_token=max(self.labels_per_token, other.labels_per_token),
        )


def read_workload(sample_costs: Path, *, split: str = "train") -> Workload:
    """Sum up one split's costs, shard by shard.

    Raises:
        FormatError: there is no cost of that split, or a file lacks a column.
    """
    total = None
    for file in sorted((sample_costs / split).rglob("*.parquet")):
        found = _read_shard(file)
        if found is not None:
            total = found if total is None else total + found
    if total is None:
        raise FormatError(
            f"There are no sample costs of the split '{split}' in {sample_costs}",
            cure="Run the prepare pipeline, and look into its quarantine",
        )
    return total


def _read_shard(file: Path) -> Workload | None:
    """Sum up a shard; None where no batch can take any of its samples."""
    wanted = {name: SAMPLE_COSTS.field(name) for name in _COLUMNS}
    schema = pq.read_schema(file)
    missing = [name for name in wanted if name not in schema.names]
    if missing:
        raise FormatError(
            f"The sample costs {file.name} have no column {', '.join(missing)}",
            cure="Run the prepare pipeline again",
        )
    table = pq.read_table(file, columns=list(wanted))
    usable = table.column("status").to_numpy() == "ok"
    if not usable.any():
        return None
    tokens, labels, patches, images = (
        table.column(name).to_numpy()[usable].astype(np.int64) for name in _COLUMNS[:4]
    )
    return Workload(
        num_samples=len(tokens),
        num_tokens=int(tokens.sum()),
        squared_tokens=int((tokens**2).sum()),
        num_label_tokens=int(labels.sum()),
        num_patches=int(patches.sum()),
        squared_patches=float((patches**2 / np.maximum(images, 1)).sum()),
        max_tokens=int(tokens.max()),
        largest_patches=_largest(patches),
        largest_labels=_largest(labels),
        patches_per_token=float((patches / tokens).max()),
        labels_per_token=float((labels / tokens).max()),
    )


def _largest(*parts: np.ndarray) -> np.ndarray:
    return np.sort(np.concatenate(parts))[::-1][:_NUM_LARGEST]


def _repeat(values: np.ndarray, *, count: int) -> np.ndarray:
    """Return the first values; where there are too few they repeat, as rows may."""
    return np.resize(values[:count], count)
