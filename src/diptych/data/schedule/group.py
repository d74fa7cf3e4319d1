"""Groups of samples of one resolution bucket and near length, for mode `bucket`.

Lengths and buckets of a window's samples flow in; their order, group after group, flows out. Knows
nothing of shards, epochs or ranks.
"""

from __future__ import annotations

import numpy as np

from diptych.data.schedule.draws import Draws

_LENGTH_JITTER = 0.05
"""Lengths are compared up to this fraction, so that groups differ from epoch to epoch."""


def group(num_tokens: np.ndarray, *, buckets: np.ndarray, size: int, draws: Draws) -> np.ndarray:
    """Order samples so that each `size` of them are alike.

    Of each bucket as many samples as fill groups are sorted by length and cut; what is left of all
    buckets, chosen at random, makes groups of near length.

    Args:
        num_tokens: [N], N a multiple of `size`.
        buckets: [N] the bucket of each sample.
        size: samples of a group.
        draws: random numbers.

    Returns:
        [N / size, size] int64, each sample once.
    """
    order = draws.permutation(len(num_tokens))
    lengths = num_tokens * (1 + _LENGTH_JITTER * draws.uniform(len(num_tokens)))
    ordered, left = [order[:0]], [order[:0]]
    for bucket in np.unique(buckets):
        members = order[buckets[order] == bucket]
        num_grouped = len(members) // size * size
        grouped = members[:num_grouped]
        ordered.append(grouped[np.argsort(lengths[grouped], kind="stable")])
        left.append(members[num_grouped:])
    rest = np.concatenate(left)
    ordered.append(rest[np.argsort(lengths[rest], kind="stable")])
    return np.concatenate(ordered).reshape(-1, size)
