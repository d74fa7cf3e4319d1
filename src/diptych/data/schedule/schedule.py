"""Which rows make up every global batch: a pure function of costs, buckets, spec and epoch.

The costs of one split flow in; rows of sample numbers flow out, the same for any world size,
micro-batch, worker count and layout. What a row holds, and which rank computes it, is unknown here.

A *window* is a few shards, shuffled together and independent of the other windows. How many rows
it gives is known without drawing it: in mode `bucket` as many whole groups as its samples fill, in
mode `pack` its load over the fill that packing reaches. What is left over in the windows meets in
the *tail*, the last rows of an epoch. The rows of an epoch follow one another, and global batch k
is rows [k N, (k + 1) N): finding it draws the windows that it touches and no others.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np

from diptych.core.errors import ConfigError
from diptych.core.hashing import sha256_json
from diptych.core.records import Buckets, ScheduleSpec
from diptych.data.costs import Costs
from diptych.data.schedule.balance import sum_rows, weigh_samples
from diptych.data.schedule.draws import Draws
from diptych.data.schedule.eligible import Eligible
from diptych.data.schedule.mix import repeats_of_sources
from diptych.data.schedule.modes import MODES
from diptych.data.schedule.ragged import Rows
from diptych.data.schedule.windows import Window, Windows

_VERSION = 2
_TAIL = 3
_NUM_KEPT = 2
"""Windows, and epochs, that are kept: a batch may touch two windows."""


@dataclass(eq=False)
class _Epoch:
    """What is known of an epoch without drawing it, and what was learnt since.

    Attributes:
        windows: in their order.
        starts: [number of windows + 1] int64, the first row of each window, then of the tail.
        left: the samples that a window leaves over, of the windows where that was asked.
        first_asked: the first step that `is_last` was asked for.
    """

    windows: list[Window]
    starts: np.ndarray
    left: dict[int, np.ndarray] = field(default_factory=dict)
    first_asked: int | None = None


class Schedule:
    """The rows of every step.

    Attributes:
        costs: of the split.
        spec: what decides the rows.
        sha256: the schedule's identity.
        num_left_out: how many samples no epoch takes, by reason: a status, or 'over_long'.
    """

    def __init__(self, costs: Costs, *, buckets: Buckets, spec: ScheduleSpec) -> None:
        """Check that the spec can be met.

        Raises:
            ConfigError: `global_batch` is not a multiple of `group`, or repeats or weights are
                wrong.
            DataError: there is no sample, or one is over-long and the spec refuses that.
        """
        if spec.mode == "bucket":
            _check_group(spec)
        self.costs = costs
        self.spec = spec
        self.sha256 = sha256_json(
            {
                "version": _VERSION,
                "manifest_sha256": costs.manifest_sha256,
                "processor_sha256": costs.processor_sha256,
                "split": costs.split,
                "buckets": buckets.model_dump(mode="json"),
                "spec": spec.model_dump(mode="json"),
            }
        )
        costs.keep(2 * spec.window_shards)
        eligible = Eligible(costs, spec=spec)
        self.num_left_out = eligible.num_left_out
        num_by_source = np.bincount(
            costs.shard_sources, weights=eligible.num_samples, minlength=len(costs.sources)
        ).astype(np.int64)
        repeats = repeats_of_sources(spec, sources=costs.sources, num_samples=num_by_source)
        self._windows = Windows(
            eligible, repeats=repeats, shard_sources=costs.shard_sources, spec=spec
        )
        self._mode = MODES[spec.mode](self._windows, costs=costs, buckets=buckets, spec=spec)
        self._epochs: OrderedDict[int, _Epoch] = OrderedDict()
        self._drawn: OrderedDict[tuple[int, int], Rows] = OrderedDict()
        self._tail_weights = (np.empty(0, dtype=np.int64), np.empty(0))

    @property
    def group(self) -> int:
        """Rows that stay together in a micro-batch; packed rows go with any other."""
        return self.spec.group if self.spec.mode == "bucket" else 1

    def num_steps(self, epoch: int) -> int:
        """Count an epoch's steps; in mode `pack` this draws all windows of the epoch, once."""
        if self.spec.mode == "bucket":
            return -(-self._windows.num_samples // self.spec.global_batch)
        known = self._epoch(epoch)
        num_rows = int(known.starts[-1]) + len(self._draw(epoch, number=len(known.windows)))
        return -(-num_rows // self.spec.global_batch)

    def is_last(self, epoch: int, number: int) -> bool:
        """Say whether a step is its epoch's last.

        Asked step after step, it learns what the windows leave over bit by bit, evenly up to the
        epoch's end, so that no step waits for the whole epoch.
        """
        known = self._epoch(epoch)
        num_sure = -(-int(known.starts[-1]) // self.spec.global_batch)
        if known.first_asked is None:
            known.first_asked = number
        asked = (number + 1 - known.first_asked) / max(num_sure - known.first_asked, 1)
        for window in range(int(min(asked, 1) * len(known.windows))):
            self._left(known, number=window)
        return number + 1 >= num_sure and number + 1 >= self.num_steps(epoch)

    def rows(self, epoch: int, number: int) -> Rows:
        """Return a global batch.

        Args:
            epoch: from 0.
            number: the step within the epoch, below `num_steps(epoch)`.

        Returns:
            `global_batch` rows; the last of an epoch's last batch may be empty.
        """
        size = self.spec.global_batch
        first, end = number * size, (number + 1) * size
        known = self._epoch(epoch)
        parts = []
        begins = int(np.searchsorted(known.starts, first, side="right")) - 1
        for window in range(begins, len(known.starts)):
            start = int(known.starts[window])
            if start >= end:
                break
            parts.append(_cut(self._draw(epoch, number=window), first - start, end - start))
        assert sum(map(len, parts)), f"epoch {epoch} has no step {number}"
        return _join(parts, num_rows=size)

    def weigh(self, rows: Rows) -> np.ndarray:
        """Return each row's mixed cost, [number of rows] float64; 1 is an average sample's.

        The sum of tokens, squared lengths of samples, and patches, each in units of its mean over
        the split's samples and times its weight.
        """
        return sum_rows(self._weigh_samples(rows.samples), rows=rows)

    def _weigh_samples(self, samples: np.ndarray) -> np.ndarray:
        """Weigh samples; those of the tail are of many shards, so their weights are kept."""
        tail, tail_weights = self._tail_weights
        places = np.minimum(np.searchsorted(tail, samples), max(len(tail) - 1, 0))
        known = tail[places] == samples if len(tail) else np.zeros(len(samples), dtype=bool)
        weights = np.empty(len(samples))
        weights[known] = tail_weights[places[known]]
        costs = self.costs.take(samples[~known])
        weights[~known] = weigh_samples(costs, totals=self.costs.totals, spec=self.spec)
        return weights

    def _epoch(self, epoch: int) -> _Epoch:
        if epoch not in self._epochs:
            windows = self._windows.of_epoch(epoch)
            counts = [self._mode.num_rows(window) for window in windows]
            starts = np.cumsum([0, *counts], dtype=np.int64)
            _keep(self._epochs, key=epoch, value=_Epoch(windows, starts))
        return self._epochs[epoch]

    def _draw(self, epoch: int, *, number: int) -> Rows:
        """Return the rows of a window in their order; after the last comes the tail."""
        key = (epoch, number)
        if key not in self._drawn:
            known = self._epoch(epoch)
            if number == len(known.windows):
                rows = self._draw_tail(epoch)
            else:
                rows, known.left[number] = self._mode.fill(
                    known.windows[number], first=int(known.starts[number])
                )
            _keep(self._drawn, key=key, value=rows)
        return self._drawn[key]

    def _draw_tail(self, epoch: int) -> Rows:
        known = self._epoch(epoch)
        left = [self._left(known, number=number) for number in range(len(known.windows))]
        samples = np.concatenate(left)
        ordered = np.sort(samples)
        weights = weigh_samples(self.costs.take(ordered), totals=self.costs.totals, spec=self.spec)
        self._tail_weights = (ordered, weights)
        draws = Draws(self.spec.seed, epoch, _TAIL)
        return self._mode.fill_tail(samples, first=int(known.starts[-1]), draws=draws)

    def _left(self, epoch: _Epoch, *, number: int) -> np.ndarray:
        if number not in epoch.left:
            epoch.left[number] = self._mode.left(epoch.windows[number])
        return epoch.left[number]


def _check_group(spec: ScheduleSpec) -> None:
    if spec.global_batch % spec.group:
        nearest = max(1, round(spec.global_batch / spec.group)) * spec.group
        raise ConfigError(
            f"A global batch of {spec.global_batch} rows cannot be made of groups of {spec.group}",
            allowed="train.schedule.global_batch is a multiple of train.schedule.group",
            cure=f"Set global_batch to {nearest}, or choose another group",
        )


def _keep(cache: OrderedDict, *, key: object, value: object) -> None:
    cache[key] = value
    if len(cache) > _NUM_KEPT:
        cache.popitem(last=False)


def _cut(rows: Rows, first: int, end: int) -> Rows:
    """Return the rows [first, end), as far as there are any."""
    starts = rows.starts[min(max(first, 0), len(rows)) : end + 1]
    return Rows(rows.samples[starts[0] : starts[-1]], starts - starts[0])


def _join(parts: list[Rows], *, num_rows: int) -> Rows:
    """Put rows one after the other, and empty ones behind them up to `num_rows`."""
    counts = np.zeros(num_rows, dtype=np.int64)
    found = np.concatenate([np.diff(part.starts) for part in parts])
    counts[: len(found)] = found
    samples = np.concatenate([part.samples for part in parts])
    return Rows(samples, np.concatenate([[0], np.cumsum(counts)]))
