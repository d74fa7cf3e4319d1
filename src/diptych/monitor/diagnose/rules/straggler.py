"""`straggler`: the others wait for one rank, always the same."""

from __future__ import annotations

from diptych.core.records import Finding
from diptych.monitor.diagnose.findings import change, finding, percent, ramp
from diptych.monitor.diagnose.settings import Settings
from diptych.monitor.diagnose.signals import Signals

LEAST, SURE = 0.10, 0.20
"""Share of the time that the others wait for it."""
SAME = 0.8
"""Share of what is lost that is lost to the same rank."""
OFTEN = 0.75
"""Share of the steps in which it is the last one; a few bad moments make no straggler."""
EXPLAINED = 0.5
"""Share of what is lost that uneven rows explain, above which it is no straggler."""


def judge_straggler(signals: Signals, *, settings: Settings) -> Finding | None:
    """Judge whether one rank alone is what others wait for."""
    times, imbalance = signals.times, signals.imbalance
    if times is None or imbalance is None or not is_one_rank(signals):
        return None
    cost = times.waiting_most
    if cost < LEAST:
        return None
    rank, where = imbalance.rank, imbalance.rank_phase
    if where == "data" and settings.num_workers > 0:
        return None  # equally slow loaders look like that; see `data`
    in_phase = times.latest[where] - times.share(where)
    return finding(
        "straggler",
        f"Rank {rank} is later than the others",
        cost=cost,
        confidence=min(
            ramp(cost, least=LEAST, sure=SURE), ramp(imbalance.dominance, least=SAME, sure=0.9)
        ),
        evidence=(
            f"of what ranks wait for a later one, {percent(imbalance.dominance)} is for rank "
            f"{rank}; they wait up to {percent(cost)} of the time",
            f"it takes longer in {where}: {percent(in_phase)} of the time more than the mean",
            _predicted(imbalance.predicted),
        ),
        steps=imbalance.worst,
        changes=[
            change(
                "train.num_workers",
                max(2, 2 * settings.num_workers),
                why="that rank's batches are late",
                gain=cost,
            )
            if where == "data"
            else None,
            change(
                "plan.layout.num_processes",
                settings.num_ranks - 1,
                why="train without that rank's device, if it stays slower (`kedro check` first)",
                gain=_gain_without(cost, num_ranks=settings.num_ranks),
            )
            if settings.num_ranks > 1
            else None,
        ],
    )


def is_one_rank(signals: Signals) -> bool:
    """Whether nearly all is lost to the same rank, step by step, and not for its rows."""
    times, imbalance = signals.times, signals.imbalance
    if times is None or imbalance is None or imbalance.dominance < SAME:
        return False
    if imbalance.often < OFTEN:
        return False
    predicted = imbalance.predicted or 0.0
    return predicted < EXPLAINED * times.waiting


def _gain_without(cost: float, *, num_ranks: int) -> float | None:
    """Return what is saved where the other ranks do its work; None if they would take longer."""
    gain = 1.0 - (1.0 - cost) * num_ranks / (num_ranks - 1)
    return gain if gain > 0 else None


def _predicted(predicted: float | None) -> str | None:
    if predicted is None:
        return None
    return f"rows are dealt out evenly: by their cost, ranks should be idle {percent(predicted)}"
