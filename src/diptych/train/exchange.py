"""What ranks tell each other: one small gather a step, under way while the step computes.

In: a rank's next batch, its share of what the step before gave, whether it was asked to stop. Out:
the same of all ranks, equal everywhere. What is decided from it is unknown here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from diptych.data.loader import StepBatch
from diptych.parallel.mesh import World, begin_gather

_NUM_OWN = 5
"""What is not of a batch: two requests, the clock, and two of saves."""
_NUM_WHOLE = 12
"""Counts of a batch that are not by source, from its rows to what was masked."""


@dataclass(frozen=True)
class Counts:
    """What the ranks' batches hold together; the last two have one number for each source."""

    num_rows: int
    num_samples: int
    num_paired: int
    num_label_tokens: int
    num_text_tokens: int
    num_image_tokens: int
    num_patches: int
    num_slots: int
    num_masked: int
    squared_slots: int
    squared_tokens: int
    squared_patches: int
    idle_fraction: float | None
    num_samples_by_source: list[int]
    num_label_tokens_by_source: list[int]


@dataclass(frozen=True)
class Agreed:
    """What all ranks hold alike once they have told each other.

    Attributes:
        stop: whether any rank was asked to stop.
        num_profiled: how many steps the first rank was asked to profile.
        since_save_s: seconds since the last checkpoint, by the first rank's clock.
        counts: of the next batch; None where there is none.
        saving: [world size, 2] float64, how far every rank's save is, see `Saver.share`.
        shares: [world size, len(share)] float64, every rank's share.
    """

    stop: bool
    num_profiled: int
    since_save_s: float
    counts: Counts | None
    saving: np.ndarray
    shares: np.ndarray


def begin_exchange(
    following: StepBatch | None,
    *,
    share: Sequence[float],
    stop: bool,
    num_profiled: int,
    since_save_s: float,
    saving: tuple[float, float],
    world: World,
) -> Callable[[], Agreed]:
    """Tell the other ranks, without waiting for them; every rank calls it.

    Args:
        following: The next batch; None on all ranks if there is none.
        share: This rank's share of what the step before gave; as long on every rank.
        stop: Whether this rank was asked to stop.
        num_profiled: How many steps this rank was asked to profile.
        since_save_s: Seconds since the last checkpoint, by this rank's clock.
        saving: How far this rank's save is.
        world: This rank's place.

    Returns:
        What waits for the others, and returns what all have said.
    """
    counted = [] if following is None else _count(following)
    own = [float(stop), since_save_s, *saving, float(num_profiled)]
    wait = begin_gather([*own, *counted, *share], world=world)
    end = _NUM_OWN + len(counted)

    def conclude() -> Agreed:
        ranks = wait()
        return Agreed(
            stop=bool(ranks[:, 0].any()),
            since_save_s=float(ranks[0, 1]),
            counts=None if following is None else _add_up(ranks[:, _NUM_OWN:end]),
            saving=ranks[:, 2:4],
            num_profiled=int(ranks[0, 4]),
            shares=ranks[:, end:],
        )

    return conclude


def _count(batch: StepBatch) -> list[float]:
    return [
        batch.cost,
        batch.num_rows,
        batch.num_samples,
        batch.num_paired,
        batch.num_label_tokens,
        batch.num_text_tokens,
        batch.num_image_tokens,
        batch.num_patches,
        batch.num_slots,
        len(batch.masked_keys),
        *batch.squares,
        *batch.num_samples_by_source,
        *batch.num_label_tokens_by_source,
    ]


def _add_up(ranks: np.ndarray) -> Counts:
    """Add up over ranks what `_count` lists."""
    costs = ranks[:, 0]
    totals = [int(total) for total in ranks[:, 1:].sum(axis=0)]
    whole, by_source = totals[:_NUM_WHOLE], totals[_NUM_WHOLE:]
    num_sources = len(by_source) // 2
    return Counts(
        *whole,
        idle_fraction=float(1.0 - costs.mean() / costs.max()) if costs.max() > 0 else None,
        num_samples_by_source=by_source[:num_sources],
        num_label_tokens_by_source=by_source[num_sources:],
    )
