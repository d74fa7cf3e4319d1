"""`evaluation`: training waits for held-out losses."""

from __future__ import annotations

from math import ceil

from diptych.core.records import Finding
from diptych.monitor.diagnose.findings import change, finding, percent, ramp
from diptych.monitor.diagnose.settings import Settings
from diptych.monitor.diagnose.signals import Signals

LEAST, SURE = 0.08, 0.20
"""Share of the time that held-out losses take."""
_WANTED = 0.04


def judge_evaluation(signals: Signals, *, settings: Settings) -> Finding | None:
    """Judge what held-out losses cost."""
    times = signals.times
    if times is None or times.latest["heldout"] < LEAST:
        return None
    cost, period = times.latest["heldout"], signals.period
    every = settings.heldout_every_steps
    fewer = max(2 * every, ceil(every * cost / _WANTED))
    samples = max(1, int(settings.heldout_max_samples * _WANTED / cost))
    return finding(
        "evaluation",
        "Training waits for held-out losses",
        cost=cost,
        confidence=ramp(cost, least=LEAST, sure=SURE),
        evidence=(
            f"held-out losses take {percent(cost)} of the time",
            f"train.heldout_every_steps is {every}, of {settings.heldout_max_samples} samples",
        ),
        steps=period.steps if period is not None and period.phase == "heldout" else (),
        changes=[
            change(
                "train.heldout_every_steps",
                fewer,
                why="fewer held-out losses",
                gain=cost * (1 - every / fewer) if every else None,
            ),
            change(
                "train.heldout_max_samples",
                samples,
                why="fewer samples in each (the loss gets noisier)",
                gain=cost * (1 - samples / max(samples, settings.heldout_max_samples)),
            ),
        ],
    )
