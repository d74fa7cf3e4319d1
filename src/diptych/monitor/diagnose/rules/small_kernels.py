"""`small_kernels`: devices are busy, and do little of what they could: memory or small kernels."""

from __future__ import annotations

from diptych.core.records import Finding
from diptych.monitor.diagnose.devices import Devices
from diptych.monitor.diagnose.findings import change, finding, percent, ramp, said
from diptych.monitor.diagnose.rules.host_launch import compute_changes
from diptych.monitor.diagnose.settings import Settings
from diptych.monitor.diagnose.signals import Signals

BUSY = 0.8
LEAST, SURE = 0.20, 0.08
"""Share of the device's peak that is reached, while it is busy and ranks compute."""
REACHABLE = 0.4
"""What large kernels reach of the peak in a whole step."""
_MOST = 0.8
_COMPUTING = 0.4


def judge_small_kernels(signals: Signals, *, settings: Settings) -> Finding | None:
    """Judge whether busy devices reach little of their peak, heat and padding aside."""
    times, devices = signals.times, signals.devices
    reached = _reached(signals)
    if times is None or reached is None or devices is None or not _is_busy(devices):
        return None
    computing = times.share("forward", "backward", "update")
    rate = reached / max(computing, 1e-9)
    if computing < _COMPUTING or rate >= LEAST:
        return None
    return finding(
        "small_kernels",
        "Devices are busy with small kernels, or with moving memory",
        cost=computing * (1.0 - rate / REACHABLE),
        confidence=min(_MOST, ramp(rate, least=LEAST, sure=SURE)),
        evidence=(
            said("devices are {} busy", devices.busy),
            f"they reach {percent(rate)} of their peak while they compute",
            None if devices.power_w is None else f"they draw {devices.power_w:.0f} W",
        ),
        changes=[
            *compute_changes(settings),
            change("plan.layout.memory.loss", "fused", why="logits are not written to memory"),
        ],
    )


def _is_busy(devices: Devices) -> bool:
    """Whether devices are busy at their full clock."""
    return devices.busy is not None and devices.busy >= BUSY and devices.throttled is None


def _reached(signals: Signals) -> float | None:
    """Return HFU, which counts all that is computed; MFU where only that is known."""
    return signals.mfu if signals.hfu is None else signals.hfu
