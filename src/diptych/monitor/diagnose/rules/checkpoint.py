"""`checkpoint`: training waits for checkpoints, or steps beside one are slow."""

from __future__ import annotations

from math import ceil

from diptych.core.records import Finding
from diptych.monitor.diagnose.findings import change, finding, percent, ramp
from diptych.monitor.diagnose.settings import Settings
from diptych.monitor.diagnose.signals import Signals

LEAST, SURE = 0.05, 0.15
"""Share of the time that checkpoints take."""
_WANTED = 0.02


def judge_checkpoint(signals: Signals, *, settings: Settings) -> Finding | None:
    """Judge what checkpoints cost: the phase, and steps that are slow as often as one is due."""
    cost = _cost(signals, settings=settings)
    if cost < LEAST:
        return None
    period = signals.period
    every = settings.checkpoint_every_steps
    fewer = max(2 * every, ceil(every * cost / _WANTED))
    regular = period is not None and period.every_steps == every
    return finding(
        "checkpoint",
        "Training waits for checkpoints",
        cost=cost,
        confidence=ramp(cost, least=LEAST, sure=SURE),
        evidence=(
            f"checkpoints take {percent(cost)} of the time",
            f"every {period.every_steps}th step is slow, by {period.extra_s:.2g} s, "
            f"{period.num} times in {signals.num_steps} steps"
            if period is not None
            else None,
            f"train.checkpoint_every_steps is {every}, not before "
            f"{settings.checkpoint_min_interval_s:g} s since the last"
            + (": slow steps come as often" if regular else ""),
        ),
        steps=period.steps if period is not None else (),
        changes=[
            change(
                "train.checkpoint_every_steps",
                fewer,
                why="fewer checkpoints; what a failure loses grows with it",
                gain=cost * (1 - every / fewer) if every else None,
            ),
            change(
                "train.checkpoint_saving",
                "async",
                why="training goes on beside the writing",
                gain=0.6 * cost,
            )
            if settings.checkpoint_saving == "sync"
            else None,
            change(
                "train.checkpoint_min_interval_s",
                f"{max(60.0, 2 * settings.checkpoint_min_interval_s):g}",
                why="at least so many seconds between two",
            ),
        ],
    )


def _cost(signals: Signals, *, settings: Settings) -> float:
    period, times = signals.period, signals.times
    measured = 0.0 if times is None else times.latest["checkpoint"]
    if period is None or period.phase not in (None, "checkpoint"):
        return measured
    # Without phases, slow steps are a checkpoint's where they come as often as one is due.
    due = settings.checkpoint_every_steps
    is_due = bool(due) and period.every_steps % due == 0 and due != settings.heldout_every_steps
    return max(measured, period.cost if period.phase == "checkpoint" or is_due else 0.0)
