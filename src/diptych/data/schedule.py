"""Which rows make up every global batch: a pure function of costs, buckets, spec and epoch.

The costs of one split flow in; row numbers flow out, the same for any world size, micro-batch,
worker count and layout. What a row holds, and which rank computes it, is unknown here.

A *window* is a few shards, shuffled together and independent of the other windows. A *group* is
`group` rows of one bucket and near length. What is left over in the windows, incomplete groups and
incomplete global batches, meets in one last window, where near rows are grouped over buckets. So
only the last global batch of an epoch can be incomplete, and finding step k is a division.
"""

from __future__ import annotations

import numpy as np

from diptych.core.errors import ConfigError, DataError
from diptych.core.hashing import sha256_json
from diptych.core.records import Buckets, ScheduleSpec
from diptych.data.bucket import bucket_of
from diptych.data.costs import Costs

NO_ROW = -1
"""Stands in a global batch where there is no sample left."""

_VERSION = 1

_LENGTH_JITTER = 0.05
"""Lengths are compared up to this fraction, so that groups differ from epoch to epoch."""


class Schedule:
    """The rows of every step."""

    def __init__(self, costs: Costs, *, buckets: Buckets, spec: ScheduleSpec) -> None:
        """Check that the spec can be met.

        Raises:
            ConfigError: `global_batch` is not a multiple of `group`.
            DataError: there is no sample, or one is longer than `max_row_tokens`.
        """
        _check(costs, spec=spec)
        self.costs = costs
        self.spec = spec
        self.row_costs = measure_rows(costs, spec=spec)
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
        self._buckets_N = bucket_of(buckets, area_px=costs.area_px, aspect=costs.aspect)
        self._latest: tuple[int, np.ndarray] | None = None

    def num_steps(self, epoch: int) -> int:
        """Count an epoch's steps; every epoch has as many, whatever its order."""
        del epoch
        return -(-self.costs.num_samples // self.spec.global_batch)

    def locate(self, step: int) -> tuple[int, int]:
        """Return the epoch that a step is in, and its number within that epoch."""
        return divmod(step, self.num_steps(0))

    def rows(self, epoch: int) -> np.ndarray:
        """Return every global batch of an epoch.

        Returns:
            [num_steps, global_batch] int64, read only: each row of the split once, and -1 in the
            last batch where there is no row left.
        """
        if self._latest is None or self._latest[0] != epoch:
            rows = self._draw(epoch)
            rows.setflags(write=False)
            self._latest = (epoch, rows)
        return self._latest[1]

    def _draw(self, epoch: int) -> np.ndarray:
        starts = self.costs.shard_starts
        order = _Random(self.spec.seed, epoch).permutation(len(starts) - 1)
        batches, rest = [], []
        for first in range(0, len(order), self.spec.window_shards):
            random = _Random(self.spec.seed, epoch, 1 + first)
            shards = order[first : first + self.spec.window_shards]
            rows = np.concatenate([np.arange(*starts[shard : shard + 2]) for shard in shards])
            full, left = self._fill_window(rows, random=random)
            batches.append(full)
            rest.append(left)
        last = self._fill_last_window(
            np.concatenate(rest), random=_Random(self.spec.seed, epoch, 1 + len(order))
        )
        return np.concatenate([*batches, last])

    def _fill_window(self, rows: np.ndarray, *, random: _Random) -> tuple[np.ndarray, np.ndarray]:
        """Return a window's full global batches, and the rows that fill none."""
        rows = rows[random.permutation(len(rows))]
        size = self.spec.group
        groups, left = [], []
        for bucket in np.unique(self._buckets_N[rows]):
            members = rows[self._buckets_N[rows] == bucket]
            num_grouped = len(members) // size * size
            groups.append(self._sort(members[:num_grouped], random=random).reshape(-1, size))
            left.append(members[num_grouped:])
        grouped = np.concatenate([np.empty((0, size), dtype=np.int64), *groups])
        grouped = grouped[random.permutation(len(grouped))]
        per_batch = self.spec.global_batch // size
        num_used = len(grouped) // per_batch * per_batch
        left.append(grouped[num_used:].reshape(-1))
        return self._fill_batches(grouped[:num_used], random=random), np.concatenate(left)

    def _fill_last_window(self, rows: np.ndarray, *, random: _Random) -> np.ndarray:
        """Return global batches of all rows; only the last has -1 rows."""
        size, global_batch = self.spec.group, self.spec.global_batch
        num_batches = -(-len(rows) // global_batch)
        rows = rows[random.permutation(len(rows))]
        num_grouped = len(rows) // size * size
        groups = self._sort(rows[:num_grouped], random=random).reshape(-1, size)
        groups = groups[random.permutation(len(groups))]
        num_used = max(num_batches - 1, 0) * (global_batch // size)
        tail = np.full((min(num_batches, 1), global_batch), NO_ROW, dtype=np.int64)
        if num_batches:
            end = np.concatenate([groups[num_used:].reshape(-1), rows[num_grouped:]])
            tail[0, : len(end)] = end
        return np.concatenate([self._fill_batches(groups[:num_used], random=random), tail])

    def _fill_batches(self, groups: np.ndarray, *, random: _Random) -> np.ndarray:
        """Put groups of near-equal cost into one batch, and shuffle the batches.

        Args:
            groups: [num_groups, group] int64, shuffled; num_groups fills global batches.
            random: where the order of the batches comes from.
        """
        per_batch = self.spec.global_batch // self.spec.group
        costs = self.row_costs[groups].sum(axis=1)
        stretch = np.arange(len(groups)) // (self.spec.balance_steps * per_batch)
        batches = groups[np.lexsort((costs, stretch))].reshape(-1, self.spec.global_batch)
        return batches[random.permutation(len(batches))]

    def _sort(self, rows: np.ndarray, *, random: _Random) -> np.ndarray:
        """Sort shuffled rows by length, up to the jitter."""
        lengths = self.costs.num_tokens[rows] * (1 + _LENGTH_JITTER * random.uniform(len(rows)))
        return rows[np.argsort(lengths, kind="stable")]


def measure_rows(costs: Costs, *, spec: ScheduleSpec) -> np.ndarray:
    """Weigh each row's work.

    Returns:
        [N] float64: tokens, squared tokens and patches, each in units of its mean over the split
        and times its weight; 1 is an average row when the weights sum to 1.
    """
    tokens = costs.num_tokens.astype(np.float64)
    parts = (
        (spec.token_weight, tokens),
        (spec.square_weight, tokens**2),
        (spec.patch_weight, costs.num_patches.astype(np.float64)),
    )
    total = np.zeros(costs.num_samples)
    for weight, values in parts:
        if values.any():
            total += weight * values / values.mean()
    return total


class _Random:
    """Random numbers from a path of integers.

    Only the generator's raw bits are used: numpy promises them to stay the same over versions,
    which it does not for `Generator.permutation`.
    """

    def __init__(self, *path: int) -> None:
        entropy = [number % 2**64 for number in path]
        self._bits = np.random.Philox(np.random.SeedSequence(entropy))

    def permutation(self, size: int) -> np.ndarray:
        """Return [size] int64, the numbers below `size` in random order."""
        return np.argsort(self._bits.random_raw(size), kind="stable")

    def uniform(self, size: int) -> np.ndarray:
        """Return [size] float64 in [0, 1)."""
        return (self._bits.random_raw(size) >> np.uint64(11)) * 2.0**-53


def _check(costs: Costs, *, spec: ScheduleSpec) -> None:
    if spec.global_batch % spec.group:
        raise ConfigError(
            f"A global batch of {spec.global_batch} rows cannot be made of groups of {spec.group}",
            allowed="train.schedule.global_batch is a multiple of train.schedule.group",
            cure=f"Set global_batch to {_nearest_multiple(spec)}, or choose another group",
        )
    if costs.num_samples == 0:
        raise DataError(
            f"The split '{costs.split}' has no sample",
            allowed="Training needs at least one",
            cure="Check `prepare.sources` and the quarantine",
        )
    too_long = costs.num_tokens > spec.max_row_tokens
    if too_long.any():
        raise DataError(
            f"{int(too_long.sum())} samples are longer than {spec.max_row_tokens} tokens; "
            f"the longest has {int(costs.num_tokens.max())}",
            allowed="Rows are never cut",
            cure="Raise train.schedule.max_row_tokens, lower prepare.processor.max_area_px, "
            "or leave these samples out",
        )


def _nearest_multiple(spec: ScheduleSpec) -> int:
    return max(1, round(spec.global_batch / spec.group)) * spec.group
