"""`throttling`: a device runs below its clock, for heat or power."""

from __future__ import annotations

from diptych.core.records import Finding
from diptych.monitor.diagnose.findings import finding, percent, ramp
from diptych.monitor.diagnose.settings import Settings
from diptych.monitor.diagnose.signals import Signals

LEAST, SURE = 0.2, 0.5
"""Share of a busy device's samples that name heat or power as the reason for a lower clock."""


def judge_throttling(signals: Signals, *, settings: Settings) -> Finding | None:
    """Judge whether the device that is slowed down most bounds the others, too."""
    throttled = None if signals.devices is None else signals.devices.throttled
    if throttled is None or throttled.share < LEAST:
        return None
    times, clock = signals.times, throttled.clock
    computing = 1.0 if times is None else times.latest["forward"] + times.latest["backward"]
    cost = None if clock is None else throttled.share * (1.0 - clock) * min(1.0, computing)
    return finding(
        "throttling",
        f"Device {throttled.index} of {throttled.node} is throttled",
        cost=cost,
        confidence=ramp(throttled.share, least=LEAST, sure=SURE),
        evidence=(
            f"in {percent(throttled.share)} of its samples the reason is "
            f"{', '.join(throttled.reasons)}",
            None if clock is None else f"its clock is then at {percent(clock)} of the highest",
            "no setting helps: look at cooling and at the power limit, or train without the device",
        ),
    )
