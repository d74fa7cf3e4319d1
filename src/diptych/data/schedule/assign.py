"""Which rank computes which rows of a global batch. Only this step knows the world size.

A global batch's rows and their costs flow in; one rank's micro-batches flow out, as many on every
rank. The union over the ranks is exactly the batch. What a row holds is unknown here.
"""

from __future__ import annotations

import heapq

import numpy as np

from diptych.core.errors import ConfigError
from diptych.data.schedule.ragged import Rows

_EMPTY = -1


def assign(
    rows: Rows,
    *,
    costs: np.ndarray,
    world_size: int,
    rank: int,
    micro_batch: int,
    group: int,
) -> list[Rows]:
    """Return one rank's micro-batches of a global batch.

    Units of consecutive rows, never parts of two groups, are dealt out: the costliest first, each
    to the rank that carries least. On a rank the costliest come first, so that ranks wait least
    for each other within a step.

    Args:
        rows: the batch, groups one after the other; an empty row stands where there is none.
        costs: [number of rows] float64, `Schedule.weigh`.
        world_size: ranks that share the batch.
        rank: which of them.
        micro_batch: rows of a micro-batch.
        group: rows of a group; 1 in mode `pack`, where any rows go together.

    Returns:
        Micro-batches of `micro_batch` rows, equally many on every rank; empty rows fill them.

    Raises:
        ConfigError: `micro_batch` neither divides `group` nor is a multiple of it.
    """
    if group % micro_batch and micro_batch % group:
        divisors = [size for size in range(1, group + 1) if group % size == 0]
        raise ConfigError(
            f"A micro-batch of {micro_batch} rows splits groups of {group} unevenly",
            allowed=f"{', '.join(map(str, divisors))}, or a multiple of {group}",
            cure="Change the layout's micro_batch or train.schedule.group",
        )
    size = min(micro_batch, group)
    units = np.arange(len(rows)).reshape(-1, size)
    unit_costs = costs.reshape(-1, size).sum(axis=1)
    # Ties keep the batch's order, so that every rank comes to the same answer.
    order = np.argsort(-unit_costs, kind="stable")
    units_each = micro_batch // size
    num_micro_batches = -(-len(units) // (world_size * units_each))
    mine = _deal(
        unit_costs, order=order, num_ranks=world_size, capacity=num_micro_batches * units_each
    )[rank]
    filled = np.full((num_micro_batches * units_each, size), _EMPTY, dtype=np.int64)
    filled[: len(mine)] = units[mine]
    return [rows.take(numbers) for numbers in filled.reshape(num_micro_batches, micro_batch)]


def _deal(
    unit_costs: np.ndarray, *, order: np.ndarray, num_ranks: int, capacity: int
) -> list[list[int]]:
    """Give each unit, in `order`, to the rank that carries least and has room."""
    hands: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [(0.0, rank) for rank in range(num_ranks)]
    for unit in order.tolist():
        load, rank = heapq.heappop(loads)
        hands[rank].append(unit)
        if len(hands[rank]) < capacity:
            heapq.heappush(loads, (load + float(unit_costs[unit]), rank))
    return hands
