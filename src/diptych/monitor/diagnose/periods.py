"""Slow steps that come back: seconds by step in, every how many steps and what they cost out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from diptych.core.records import Phase, Record, StepRecord
from diptych.monitor.diagnose.times import PHASES, phase, seconds

_SLOW = 1.25
"""A step is slow that takes so many times the median."""
_MIN_SLOW = 3
_MIN_REGULAR = 0.7
"""Share of the slow steps that must follow the one before at the same distance."""
_MOST_SLOW = 0.5


class Period(Record):
    """Every `every_steps`-th step is slow; `cost` is the share of time above the others' median.

    `phase` is where slow steps take longer, None where it was not measured.
    """

    every_steps: int
    num: int
    cost: float
    extra_s: float
    phase: Phase | None
    steps: tuple[int, ...]


def find_period(records: Sequence[StepRecord]) -> Period | None:
    """Find slow steps at equal distances; None where there are none.

    Steps must be in order; those that are left out of the log leave a gap.
    """
    if len(records) < 2 * _MIN_SLOW:
        return None
    took = np.array([seconds(record) for record in records])
    usual_s = float(np.median(took))
    slow = [int(each) for each in np.flatnonzero(took > _SLOW * usual_s)]
    if not _MIN_SLOW <= len(slow) <= _MOST_SLOW * len(records):
        return None
    every = _distance([records[each].step for each in slow])
    if every is None:
        return None
    extra = took[slow] - usual_s
    return Period(
        every_steps=every,
        num=len(slow),
        cost=float(extra.sum() / took.sum()),
        extra_s=float(np.median(extra)),
        phase=_where(records, slow=set(slow)),
        steps=tuple(records[each].step for each in slow),
    )


def _distance(steps: Sequence[int]) -> int | None:
    """Return the distance at which nearly all steps follow each other; None if there is none."""
    distances = Counter(after - before for before, after in pairwise(steps))
    every, num_regular = distances.most_common(1)[0]
    is_regular = num_regular >= _MIN_REGULAR * (len(steps) - 1)
    return every if is_regular and every >= 2 else None


def _where(records: Sequence[StepRecord], *, slow: set[int]) -> Phase | None:
    """Return the phase that slow steps have more of than others, on average."""
    if not all(record.phases_s for record in records):
        return None

    def extra_s(name: Phase) -> float:
        of_slow = [phase(records[each], name).most for each in slow]
        of_others = [
            phase(record, name).most for each, record in enumerate(records) if each not in slow
        ]
        return float(np.mean(of_slow) - np.median(of_others))

    return max(PHASES, key=extra_s)
