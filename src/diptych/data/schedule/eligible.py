"""Which samples a schedule may use: those that are usable and that a row can hold.

The costs and the row's budgets flow in; numbers per shard flow out, and a shard's samples when they
are asked for. Only shards whose summary shows a sample that is too long are read to count.
"""

from __future__ import annotations

import numpy as np

from diptych.core.errors import DataError
from diptych.core.records import ScheduleSpec
from diptych.data.costs import Costs, ShardCosts


class Eligible:
    """The samples that rows may hold.

    Attributes:
        num_samples: [num_shards] int64.
        num_tokens: [num_shards] int64, of all eligible samples of a shard together.
        num_patches: [num_shards] int64.
        num_left_out: how many samples are left out, by reason: a status, or 'over_long'.
    """

    def __init__(self, costs: Costs, *, spec: ScheduleSpec) -> None:
        """Count, and refuse what the spec refuses.

        Raises:
            DataError: no sample is eligible, or one is over-long and the spec refuses that.
        """
        self._costs = costs
        self._max_tokens = spec.max_row_tokens
        self._max_patches = spec.max_row_patches
        summary = costs.summary
        self.num_samples = summary["ok"].copy()
        self.num_tokens = summary["num_tokens"].copy()
        self.num_patches = summary["num_patches"].copy()
        over = summary["max_tokens"] > spec.max_row_tokens
        if spec.max_row_patches is not None:
            over |= summary["max_patches"] > spec.max_row_patches
        for shard in np.flatnonzero(over):
            of_shard = costs.shard(int(shard))
            fits = self._fits(of_shard)
            self.num_samples[shard] = fits.sum()
            self.num_tokens[shard] = of_shard.num_tokens[fits].sum(dtype=np.int64)
            self.num_patches[shard] = of_shard.num_patches[fits].sum(dtype=np.int64)
        num_over_long = int(summary["ok"].sum() - self.num_samples.sum())
        if num_over_long and spec.over_long == "refuse":
            self._refuse(num_over_long)
        self.num_left_out = costs.num_unusable
        if num_over_long:
            self.num_left_out["over_long"] = num_over_long
        if not self.num_samples.sum():
            self._refuse_all()

    def samples(self, shard: int) -> np.ndarray:
        """Return the eligible samples of a shard, ascending int64."""
        return self._costs.shard_starts[shard] + np.flatnonzero(
            self._fits(self._costs.shard(shard))
        )

    def _fits(self, costs: ShardCosts) -> np.ndarray:
        fits = costs.usable & (costs.num_tokens <= self._max_tokens)
        return (
            fits if self._max_patches is None else fits & (costs.num_patches <= self._max_patches)
        )

    def _refuse(self, num_over_long: int) -> None:
        totals = self._costs.totals
        if totals.max_tokens > self._max_tokens:
            limit, longest, setting = f"{self._max_tokens} tokens", totals.max_tokens, "tokens"
        else:
            limit, longest, setting = f"{self._max_patches} patches", totals.max_patches, "patches"
        raise DataError(
            f"{num_over_long} samples are longer than a row of {limit}; the longest has {longest}",
            allowed="Rows are never cut",
            cure=f"Raise train.schedule.max_row_{setting}, lower prepare.processor.max_area_px, "
            "or set train.schedule.over_long: leave_out",
        )

    def _refuse_all(self) -> None:
        split, reasons = self._costs.split, self.num_left_out
        counts = ", ".join(f"{count} {reason}" for reason, count in reasons.items())
        raise DataError(
            f"The split '{split}' has no sample that a batch can take"
            + (f": {counts}" if counts else ""),
            allowed="Training needs at least one",
            cure="Check `prepare.sources`, the quarantine and train.schedule.max_row_tokens",
        )
