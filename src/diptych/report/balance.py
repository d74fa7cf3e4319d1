"""In: a split's sample costs and the schedule's settings. Out: what random batches and ours waste.

*Padding* is the share of a batch's tokens that are no sample's. *Idle* is the share of the ranks'
time in which they wait for the one with the most work, by the schedule's mixed cost. Both are
measured on the schedule and the assignment that training uses.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from diptych.core.errors import DiptychError
from diptych.core.records import Buckets, ScheduleSpec
from diptych.data.costs import Costs
from diptych.data.schedule.assign import assign
from diptych.data.schedule.ragged import Rows
from diptych.data.schedule.schedule import Schedule

RANK_COUNTS = (8, 64)
MAX_STEPS = 100
RANDOM_BATCH = 4
"""Samples of a random micro-batch where ours are packed."""


@dataclass(frozen=True)
class Waste:
    """What a batch of random samples wastes, and what a batch of the schedule does, as shares."""

    name: str
    before: float
    after: float


@dataclass(frozen=True)
class Balance:
    """The waste of an epoch's first steps; `refused` says why there is no schedule.

    `notes` says in words what is not in the numbers: ranks that a batch is too small for, and
    samples that no row takes.
    """

    num_steps: int = 0
    wastes: tuple[Waste, ...] = ()
    notes: tuple[str, ...] = ()
    refused: str = ""


def measure_balance(costs: Costs, *, buckets: Buckets, spec: ScheduleSpec) -> Balance:
    """Compare random batches with the schedule's, over at most `MAX_STEPS` steps.

    Args:
        costs: of the training split.
        buckets: the boundaries that the schedule keeps to.
        spec: the schedule's settings.
    """
    try:
        schedule = Schedule(costs, buckets=buckets, spec=spec)
    except DiptychError as error:
        return Balance(refused=str(error))
    ours = [_measure_rows(schedule, rows=rows) for rows in _first_batches(schedule)]
    theirs = [_measure_rows(schedule, rows=rows) for rows in _random_batches(ours, seed=spec.seed)]
    wastes, notes = [], []
    for num_ranks in RANK_COUNTS:
        if num_ranks > spec.global_batch:
            notes.append(f"{num_ranks} ranks: not measured, a batch has {spec.global_batch:,} rows")
            continue
        after = _sum_up([_assign(each, schedule=schedule, num_ranks=num_ranks) for each in ours])
        size = RANDOM_BATCH
        if spec.mode == "bucket":
            size = _micro_batch(schedule, num_ranks=num_ranks)
        before = _sum_up([_deal(each, num_ranks=num_ranks, size=size) for each in theirs])
        if not wastes:
            wastes.append(Waste("padding", before.padding, after.padding))
        wastes.append(Waste(f"idle, {num_ranks} ranks", before.idle, after.idle))
    left_out = schedule.num_left_out.items()
    notes += [f"{reason}: {count:,} samples left out" for reason, count in left_out]
    return Balance(num_steps=len(ours), wastes=tuple(wastes), notes=tuple(notes))


@dataclass(frozen=True)
class _Batch:
    """A global batch as numbers: tokens and mixed cost of each row; empty rows have 0."""

    rows: Rows
    lengths: np.ndarray
    weights: np.ndarray


@dataclass(frozen=True)
class _Step:
    """What one step holds and takes: tokens, tokens with padding, and the cost on each rank."""

    num_tokens: int
    num_padded: int
    loads: np.ndarray


@dataclass(frozen=True)
class _Shares:
    padding: float
    idle: float


def _first_batches(schedule: Schedule) -> Iterator[Rows]:
    """Yield an epoch's first batches; those after them are never drawn."""
    for number in range(MAX_STEPS):
        yield schedule.rows(0, number)
        if schedule.is_last(0, number):
            return


def _random_batches(batches: list[_Batch], *, seed: int) -> Iterator[Rows]:
    """Shuffle the batches' samples and cut them into as many batches, one sample a row."""
    samples = np.concatenate([batch.rows.samples for batch in batches])
    shuffled = np.random.default_rng(seed).permutation(samples)
    for part in np.array_split(shuffled, len(batches)):
        yield Rows(part, np.arange(len(part) + 1))


def _measure_rows(schedule: Schedule, *, rows: Rows) -> _Batch:
    tokens = schedule.costs.take(rows.samples).num_tokens
    ends = np.concatenate([[0], np.cumsum(tokens, dtype=np.int64)])
    return _Batch(rows, np.diff(ends[rows.starts]), schedule.weigh(rows))


def _micro_batch(schedule: Schedule, *, num_ranks: int) -> int:
    """Return the largest micro-batch that a group can be cut into and every rank gets one of."""
    group, rows_each = schedule.group, schedule.spec.global_batch // num_ranks
    return max(size for size in range(1, group + 1) if not group % size and size <= rows_each)


def _assign(batch: _Batch, *, schedule: Schedule, num_ranks: int) -> _Step:
    """Spread a batch over ranks as training does it."""
    micro_batch = _micro_batch(schedule, num_ranks=num_ranks)
    numbered = Rows(np.arange(len(batch.rows)), np.arange(len(batch.rows) + 1))
    parts = [
        # The rows' numbers stand for the rows: what they hold does not matter to the assignment.
        assign(
            numbered,
            costs=batch.weights,
            world_size=num_ranks,
            rank=rank,
            micro_batch=micro_batch,
            group=schedule.group,
        )
        for rank in range(num_ranks)
    ]
    width = schedule.spec.max_row_tokens if schedule.spec.mode == "pack" else 0
    return _add_up(batch, parts=[[micro.samples for micro in mine] for mine in parts], width=width)


def _deal(batch: _Batch, *, num_ranks: int, size: int) -> _Step:
    """Deal a batch to ranks in its own order, in micro-batches of `size` rows."""
    parts = [
        np.split(mine, range(size, len(mine), size))
        for mine in np.array_split(np.arange(len(batch.rows)), num_ranks)
    ]
    return _add_up(batch, parts=parts, width=0)


def _add_up(batch: _Batch, *, parts: list[list[np.ndarray]], width: int) -> _Step:
    """Add up tokens, padding and loads.

    Args:
        batch: the rows' numbers.
        parts: per rank, the rows of each micro-batch.
        width: tokens that every row is padded to; 0 pads a micro-batch to its longest row.
    """
    num_padded = 0
    for rows in (rows for mine in parts for rows in mine):
        lengths = batch.lengths[rows]
        num_padded += int(np.count_nonzero(lengths)) * (width or int(lengths.max(initial=0)))
    loads = np.array([batch.weights[np.concatenate(mine)].sum() for mine in parts])
    return _Step(int(batch.lengths.sum()), num_padded, loads)


def _sum_up(steps: list[_Step]) -> _Shares:
    """Weigh the steps by what they hold and by the time they take."""
    num_tokens = sum(step.num_tokens for step in steps)
    num_padded = sum(step.num_padded for step in steps)
    mean_cost = sum(step.loads.mean() for step in steps)
    max_cost = sum(step.loads.max() for step in steps)
    return _Shares(padding=1 - num_tokens / num_padded, idle=float(1 - mean_cost / max_cost))
