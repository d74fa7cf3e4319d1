"""`host_launch`: devices are idle while ranks compute: the host launches kernels too slowly."""

from __future__ import annotations

from diptych.core.records import Change, Finding
from diptych.monitor.diagnose.findings import change, finding, percent, ramp
from diptych.monitor.diagnose.settings import Settings
from diptych.monitor.diagnose.signals import Signals

LEAST, SURE = 0.15, 0.35
"""Share of the time that devices are idle with no wait to explain it."""


def judge_host_launch(signals: Signals, *, settings: Settings) -> Finding | None:
    """Judge what devices are idle beyond the waits that ranks know of."""
    times, devices = signals.times, signals.devices
    if times is None or devices is None or devices.busy is None:
        return None
    waits = times.share("data", "checkpoint", "other")
    cost = 1.0 - devices.busy - waits
    if cost < LEAST:
        return None
    return finding(
        "host_launch",
        "Devices wait for the host to launch kernels",
        cost=cost,
        confidence=ramp(cost, least=LEAST, sure=SURE),
        evidence=(
            f"devices are {percent(devices.busy)} busy, while ranks spend "
            f"{percent(times.share('forward', 'backward', 'update'))} of the time computing",
            f"waits for data and checkpoints explain {percent(waits)} of the rest",
        ),
        changes=compute_changes(settings),
    )


def compute_changes(settings: Settings) -> list[Change | None]:
    """List what makes fewer, larger kernels of the same work."""
    return [
        change(
            "plan.layout.compile.blocks",
            "[vision, language]",
            why="each block becomes a few fused kernels",
        )
        if not settings.compiled
        else change(
            "plan.layout.compile.shapes",
            "static",
            why="with plan.layout.memory.token_multiple, one graph for each of few shapes",
        ),
        change(
            "plan.layout.micro_batch",
            2 * settings.micro_batch,
            why="each kernel has twice the work (takes memory)",
        ),
        change("train.schedule.mode", "pack", why="rows are long and full (a new run)")
        if settings.mode == "bucket"
        else None,
        change("plan.layout.precision", "bf16", why="half the bytes, and tensor cores")
        if settings.precision == "fp32" and settings.device == "cuda"
        else None,
    ]
