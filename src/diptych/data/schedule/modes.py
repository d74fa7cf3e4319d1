"""How a window's samples become rows: one sample a row, in groups, or several packed into one.

A window, or the samples of an epoch's tail, and their costs flow in; rows in their order, and what
is left over, flow out. Which windows there are, and what a batch is made of, is unknown here.
"""

from __future__ import annotations

from functools import cached_property
from typing import Protocol

import numpy as np

from diptych.core.records import Buckets, ScheduleSpec
from diptych.data.bucket import bucket_of
from diptych.data.costs import Costs, ShardCosts
from diptych.data.schedule.balance import arrange, sum_rows, weigh_samples
from diptych.data.schedule.draws import Draws
from diptych.data.schedule.group import group
from diptych.data.schedule.pack import measure_load, pack, resize
from diptych.data.schedule.ragged import Rows
from diptych.data.schedule.windows import Window, Windows

_LOAD_JITTER = 0.02
"""Loads are compared up to this fraction, so that packed rows differ from epoch to epoch."""


class Mode(Protocol):
    """One way to make rows."""

    def __init__(
        self, windows: Windows, *, costs: Costs, buckets: Buckets, spec: ScheduleSpec
    ) -> None: ...

    def num_rows(self, window: Window) -> int:
        """Count the rows of a window without drawing it."""
        ...

    def fill(self, window: Window, *, first: int) -> tuple[Rows, np.ndarray]:
        """Make a window's rows, `num_rows` of them.

        Args:
            window: which one.
            first: the place of its first row in the epoch.

        Returns:
            The rows in their order, and the samples that are left over.
        """
        ...

    def left(self, window: Window) -> np.ndarray:
        """Return what `fill` leaves over, doing no more than that takes."""
        ...

    def fill_tail(self, samples: np.ndarray, *, first: int, draws: Draws) -> Rows:
        """Make rows of all samples that windows left over.

        Args:
            samples: [N] int64.
            first: the place of the first row in the epoch.
            draws: random numbers.
        """
        ...


class Grouped:
    """Mode `bucket`: rows of one sample, `group` of them alike."""

    def __init__(
        self, windows: Windows, *, costs: Costs, buckets: Buckets, spec: ScheduleSpec
    ) -> None:
        """Take where samples come from, and what groups are made by."""
        self._windows = windows
        self._costs = costs
        self._buckets = buckets
        self._spec = spec

    def num_rows(self, window: Window) -> int:
        """Count as many whole groups as the samples make."""
        return window.num_samples // self._spec.group * self._spec.group

    def fill(self, window: Window, *, first: int) -> tuple[Rows, np.ndarray]:
        """Group a window's samples; the last ones, at random, that fill no group are left over."""
        samples = self._windows.draw(window)
        grouped, left = np.split(samples, [self.num_rows(window)])
        rows = self._group(grouped, first=first, draws=self._windows.draws(window))
        # A view would keep the whole window in memory.
        return rows, left.copy()

    def left(self, window: Window) -> np.ndarray:
        """Draw only the shards that the last samples are of."""
        num_left = window.num_samples - self.num_rows(window)
        return self._windows.draw_last(window, num_samples=num_left)

    def fill_tail(self, samples: np.ndarray, *, first: int, draws: Draws) -> Rows:
        """Group the samples; those that fill no group come last."""
        samples = samples[draws.permutation(len(samples))]
        num_grouped = len(samples) // self._spec.group * self._spec.group
        rows = self._group(samples[:num_grouped], first=first, draws=draws)
        return _one_each(np.concatenate([rows.samples, samples[num_grouped:]]))

    def _group(self, samples: np.ndarray, *, first: int, draws: Draws) -> Rows:
        spec, costs = self._spec, self._costs.take(samples)
        groups = group(
            costs.num_tokens,
            buckets=bucket_of(self._buckets, area_px=costs.area_px, aspect=costs.aspect),
            size=spec.group,
            draws=draws,
        )
        weights = weigh_samples(costs, totals=self._costs.totals, spec=spec)
        order = arrange(
            weights[groups].sum(axis=1),
            first=first // spec.group,
            per_batch=spec.global_batch // spec.group,
            balance_steps=spec.balance_steps,
            draws=draws,
        )
        return _one_each(samples[groups[order].reshape(-1)])


class Packed:
    """Mode `pack`: rows of several samples, up to both budgets."""

    def __init__(
        self, windows: Windows, *, costs: Costs, buckets: Buckets, spec: ScheduleSpec
    ) -> None:
        """Take where samples come from, and the budgets; buckets play no part."""
        del buckets
        self._windows = windows
        self._costs = costs
        self._spec = spec

    def num_rows(self, window: Window) -> int:
        """Count the rows that the window's load makes at the fill that packing reaches."""
        return min(round(window.load / self._fill), window.num_samples)

    def fill(self, window: Window, *, first: int) -> tuple[Rows, np.ndarray]:
        """Pack a window's samples; those of the emptiest rows are left over."""
        draws = self._windows.draws(window)
        samples = self._windows.draw(window)
        costs = self._costs.take(samples)
        packed, left = self._pack_window(costs, num_rows=self.num_rows(window), draws=draws)
        rows = self._arrange(packed, samples=samples, costs=costs, first=first, draws=draws)
        return rows, samples[left]

    def left(self, window: Window) -> np.ndarray:
        """Pack the window, and leave its rows in no order."""
        samples = self._windows.draw(window)
        _, left = self._pack_window(
            self._costs.take(samples),
            num_rows=self.num_rows(window),
            draws=self._windows.draws(window),
        )
        return samples[left]

    def fill_tail(self, samples: np.ndarray, *, first: int, draws: Draws) -> Rows:
        """Pack the samples into as few rows as they need."""
        costs = self._costs.take(samples)
        rows = self._pack(costs, draws=draws)
        return self._arrange(rows, samples=samples, costs=costs, first=first, draws=draws)

    @cached_property
    def _fill(self) -> float:
        """How full packed rows are, measured once on a typical window."""
        window = self._windows.typical()
        costs = self._costs.take(self._windows.draw(window))
        return window.load / len(self._pack(costs, draws=self._windows.draws(window)))

    def _pack(self, costs: ShardCosts, *, draws: Draws) -> Rows:
        return pack(
            costs.num_tokens,
            num_patches=costs.num_patches,
            max_tokens=self._spec.max_row_tokens,
            max_patches=self._spec.max_row_patches,
            jitter=1 + _LOAD_JITTER * draws.uniform(len(costs.num_tokens)),
        )

    def _pack_window(
        self, costs: ShardCosts, *, num_rows: int, draws: Draws
    ) -> tuple[Rows, np.ndarray]:
        """Pack into a given number of rows; return these, and what is left over."""
        packed = self._pack(costs, draws=draws)
        fills = measure_load(
            sum_rows(costs.num_tokens[packed.samples], rows=packed),
            num_patches=sum_rows(costs.num_patches[packed.samples], rows=packed),
            max_tokens=self._spec.max_row_tokens,
            max_patches=self._spec.max_row_patches,
        )
        return resize(packed, num_rows=num_rows, fills=fills)

    def _arrange(
        self, rows: Rows, *, samples: np.ndarray, costs: ShardCosts, first: int, draws: Draws
    ) -> Rows:
        """Order packed rows, and name their samples."""
        weights = weigh_samples(costs, totals=self._costs.totals, spec=self._spec)
        order = arrange(
            sum_rows(weights[rows.samples], rows=rows),
            first=first,
            per_batch=self._spec.global_batch,
            balance_steps=self._spec.balance_steps,
            draws=draws,
        )
        ordered = rows.take(order)
        return Rows(samples[ordered.samples], ordered.starts)


MODES: dict[str, type[Mode]] = {"bucket": Grouped, "pack": Packed}
"""By `ScheduleSpec.mode`."""


def _one_each(samples: np.ndarray) -> Rows:
    return Rows(samples, np.arange(len(samples) + 1))
