"""What rows cost, and their order: near-equal cost within a global batch, batches in no order.

Samples' costs flow in, and where a window begins in the epoch; weights, and the order of units
(rows, or groups of rows), flow out. Knows nothing of ranks.
"""

from __future__ import annotations

import numpy as np

from diptych.core.records import ScheduleSpec
from diptych.data.costs import ShardCosts, Totals
from diptych.data.schedule.draws import Draws
from diptych.data.schedule.ragged import Rows


def weigh_samples(costs: ShardCosts, *, totals: Totals, spec: ScheduleSpec) -> np.ndarray:
    """Weigh each sample's work.

    Args:
        costs: of the samples.
        totals: of the split, for the means.
        spec: the weights.

    Returns:
        [N] float64: tokens, squared tokens and patches, each in units of its mean over the split
        and times its weight; 1 is an average sample when the weights sum to 1.
    """
    tokens = costs.num_tokens.astype(np.float64)
    parts = (
        (spec.token_weight, tokens, totals.num_tokens),
        (spec.square_weight, tokens**2, totals.squared_tokens),
        (spec.patch_weight, costs.num_patches.astype(np.float64), totals.num_patches),
    )
    weights = np.zeros(len(tokens))
    for weight, values, total in parts:
        if total:
            weights += weight * values / (total / totals.num_samples)
    return weights


def sum_rows(values: np.ndarray, *, rows: Rows) -> np.ndarray:
    """Sum over each row.

    Args:
        values: [number of samples], in the order of `rows.samples`.
        rows: which of them are of one row.

    Returns:
        [number of rows] float64.
    """
    row_of = np.repeat(np.arange(len(rows)), np.diff(rows.starts))
    return np.bincount(row_of, weights=values, minlength=len(rows))


def arrange(
    unit_costs: np.ndarray, *, first: int, per_batch: int, balance_steps: int, draws: Draws
) -> np.ndarray:
    """Order units so that those of one batch cost nearly the same.

    The units are shuffled and cut into stretches of at least `balance_steps` batches; within a
    stretch they are sorted by cost and dealt to its batches. The batches are then shuffled. A batch
    that the window shares with its neighbours stays at its end, and takes units of middling cost,
    which are most like those of the neighbour.

    Args:
        unit_costs: [N] float64.
        first: the place of the window's first unit in the epoch.
        per_batch: units of a global batch; batches begin at its multiples.
        balance_steps: batches of a stretch.
        draws: random numbers.

    Returns:
        [N] int64, each unit once.
    """
    num_units = len(unit_costs)
    order = draws.permutation(num_units)
    if num_units == 0:
        return order
    cuts = np.arange(first // per_batch + 1, -(-(first + num_units) // per_batch)) * per_batch
    bounds = np.concatenate([[0], cuts - first, [num_units]])
    sizes = np.diff(bounds)
    num_stretches = max(1, len(sizes) // balance_steps)
    batches: list[np.ndarray] = [order] * len(sizes)
    for stretch in np.array_split(np.arange(len(sizes)), num_stretches):
        members = order[bounds[stretch[0]] : bounds[stretch[-1] + 1]]
        members = members[np.argsort(unit_costs[members], kind="stable")]
        whole = stretch[sizes[stretch] == per_batch]
        partial = stretch[sizes[stretch] < per_batch]
        by_cost = np.insert(whole, len(whole) // 2, partial)
        for batch, dealt in zip(
            by_cost, np.split(members, np.cumsum(sizes[by_cost])[:-1]), strict=True
        ):
            batches[batch] = dealt
    whole = np.flatnonzero(sizes == per_batch)
    places = np.arange(len(sizes))
    places[whole] = whole[draws.permutation(len(whole))]
    return np.concatenate([batches[place] for place in places])
