"""Where ranks' time went: step records in, shares of it by phase and the cost of waiting out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import median
from typing import get_args

import numpy as np

from diptych.core.records import Over, Phase, Record, StepRecord
from diptych.monitor.diagnose.measured import known

PHASES: tuple[Phase, ...] = tuple(name for name in get_args(Phase) if name != "profile")
"""What a run's time is made of; a profile's own is nobody's."""
OWN: tuple[Phase, ...] = ("data", "place", "forward", "backward", "update", "other")
"""Phases in which a rank is busy with its own, so that others may wait for it."""
COMPUTE: tuple[Phase, ...] = ("forward", "backward")
_NOTHING = Over(0.0, 0.0, 0.0, 0)


class Times(Record):
    """Shares of a window's time; those of `shares` are means over ranks and add up to 1.

    `latest` has the share of each phase on the rank that had most of it. Communication is split:
    `exchange` is what even the rank that all wait for spends in it, `waiting` what ranks on average
    wait beside that for a later one, and `waiting_most` what the first one does.
    """

    total_s: float
    shares: dict[Phase, float]
    latest: dict[Phase, float]
    exchange: float
    waiting: float
    waiting_most: float

    def share(self, *phases: Phase) -> float:
        """Add up the shares of phases."""
        return sum(self.shares.get(phase, 0.0) for phase in phases)


class Imbalance(Record):
    """How unevenly ranks were busy.

    `rank` was the last one most often: of all that was lost, `dominance` was lost in steps in which
    it was, and it was in `often` of the steps; `rank_phase` is where it took longer. `predicted` is
    the mean `idle_fraction`, what the rows that ranks were given cost unevenly. `follows_work` is
    the correlation, over steps, of what was lost with that, or with the step's patches. `worst` are
    the steps that lost most.
    """

    rank: int
    rank_phase: Phase
    dominance: float
    often: float
    predicted: float | None
    follows_work: float | None
    worst: tuple[int, ...]


def phase(record: StepRecord, name: Phase) -> Over:
    """Return a phase of a step; one that is not there took no time."""
    return record.phases_s.get(name, _NOTHING)


def without_profiled(records: Sequence[StepRecord]) -> list[StepRecord]:
    """Leave out steps that a profile made slower, where others are left."""
    usual = [record for record in records if not record.profiled]
    return usual or list(records)


def seconds(record: StepRecord) -> float:
    """Return a step's seconds with what stands between it and the next, as far as measured.

    A profile's own are left out.
    """
    if not record.phases_s:
        return record.step_s
    return sum(phase(record, name).mean for name in PHASES)


def measure_times(records: Sequence[StepRecord]) -> Times | None:
    """Add up phases over steps; None where no step has any."""
    timed = [record for record in records if record.phases_s]
    total_s = sum(map(seconds, timed))
    if not total_s:
        return None
    sums: dict[Phase, Over] = {name: _sums(timed, name=name) for name in PHASES}
    return Times(
        total_s=total_s,
        shares={name: each.mean / total_s for name, each in sums.items()},
        latest={name: each.most / total_s for name, each in sums.items()},
        exchange=sums["communication"].least / total_s,
        waiting=sum(map(_waited, timed)) / total_s,
        waiting_most=sum(map(_waited_most, timed)) / total_s,
    )


def _sums(records: Sequence[StepRecord], *, name: Phase) -> Over:
    """Add up a phase over steps; the rank means nothing then."""
    least, mean, most, _ = np.sum([phase(record, name) for record in records], axis=0)
    return Over(float(least), float(mean), float(most), 0)


def measure_imbalance(records: Sequence[StepRecord]) -> Imbalance | None:
    """Find the rank that others waited for; None where no step has phases, or nothing was lost."""
    timed = [record for record in records if record.phases_s]
    lost = [_waited(record) for record in timed]
    if not sum(lost):
        return None
    last = [_last(record) for record in timed]
    by_rank = _lost_to(last, lost=lost)
    rank = max(by_rank, key=by_rank.__getitem__)
    idle = known(record.idle_fraction for record in timed)
    worst = np.argsort(lost)[::-1][:5]
    return Imbalance(
        rank=rank,
        rank_phase=_slow_phase(timed, rank=rank),
        dominance=by_rank[rank] / sum(lost),
        often=last.count(rank) / len(last),
        predicted=sum(idle) / len(idle) if idle else None,
        follows_work=_follows(lost, timed=timed),
        worst=tuple(sorted(timed[number].step for number in worst)),
    )


def _lost_to(last: Sequence[int], *, lost: Sequence[float]) -> dict[int, float]:
    """Give what was lost in each step to the rank that was the last one in it."""
    by_rank: defaultdict[int, float] = defaultdict(float)
    for rank, lost_s in zip(last, lost, strict=True):
        by_rank[rank] += lost_s
    return by_rank


def _last(record: StepRecord) -> int:
    behind = _behind(record)
    return max(behind, key=behind.__getitem__)


def _slow_phase(records: Sequence[StepRecord], *, rank: int) -> Phase:
    """Return the phase in which a rank is most behind, over steps in which it has most of it."""

    def behind_s(name: Phase) -> float:
        found = [phase(record, name) for record in records]
        return sum(_excess(each) for each in found if each.rank == rank)

    return max(OWN, key=behind_s)


def wait_for_batches(records: Sequence[StepRecord]) -> float:
    """Return the share of steps' time in which the slowest rank waited for a batch.

    Of steps without phases `data_s` says it, of others the phase.
    """
    total_s = sum(map(seconds, records))
    waited = sum(
        phase(record, "data").most if record.phases_s else record.data_s for record in records
    )
    return waited / total_s if total_s else 0.0


def typical_s(records: Sequence[StepRecord]) -> float:
    """Return the median of `step_s`."""
    return median(record.step_s for record in records)


def _waited(record: StepRecord) -> float:
    """Return what ranks on average waited for a later one: no more than that one was behind."""
    exchange = phase(record, "communication")
    behind = sum(_excess(phase(record, name)) for name in OWN)
    return min(max(0.0, exchange.mean - exchange.least), behind)


def _waited_most(record: StepRecord) -> float:
    exchange = phase(record, "communication")
    behind = sum(phase(record, name).most - phase(record, name).least for name in OWN)
    return min(max(0.0, exchange.most - exchange.least), behind)


def _excess(over: Over) -> float:
    return max(0.0, over.most - over.mean)


def _behind(record: StepRecord) -> dict[int, float]:
    """Return by how much each rank that has most of a phase was behind the mean in all of them."""
    behind: defaultdict[int, float] = defaultdict(float)
    for name in OWN:
        over = phase(record, name)
        behind[over.rank] += _excess(over)
    return behind


def _follows(lost: Sequence[float], *, timed: Sequence[StepRecord]) -> float | None:
    found = [
        _correlation(lost, [float(record.num_patches) for record in timed]),
        _correlation(lost, [record.idle_fraction or 0.0 for record in timed]),
    ]
    known = [each for each in found if each is not None]
    return max(known) if known else None


def _correlation(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Return Pearson's correlation; None where one of the two does not change."""
    if len(first) < 8 or not np.std(first) or not np.std(second):
        return None
    return float(np.corrcoef(first, second)[0, 1])
