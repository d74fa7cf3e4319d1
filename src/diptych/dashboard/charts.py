"""What is drawn of a run: every chart as data, by the tab that it stands in.

A column's `*` stands for any name: of a source, a tower, a device. Nothing is read here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Axis = Literal["steps", "clock"]
Tab = Literal["loss", "speed", "devices", "settings", "answers"]
Style = Literal["line", "points"]

TABS: dict[Tab, str] = {
    "loss": "Loss",
    "speed": "Speed",
    "devices": "Memory and devices",
    "settings": "Settings and events",
    "answers": "Answers",
}
_NUM_FIRST = 2
_GIB = 2.0**30
_MB = 1e6
_PHASES = (
    "forward",
    "backward",
    "update",
    "communication",
    "data",
    "place",
    "checkpoint",
    "heldout",
    "profile",
    "other",
)


@dataclass(frozen=True)
class Curve:
    """One column of a chart, or all that its `*` stands for."""

    column: str
    label: str = ""
    style: Style = "line"


@dataclass(frozen=True)
class Chart:
    """One chart; `scale` is what values are divided by. `stack`: areas on each other, of one run.

    `smoothed`: whether it follows the setting of that; `log` likewise.
    """

    name: str
    title: str
    unit: str
    tab: Tab
    curves: tuple[Curve, ...]
    axis: Axis = "steps"
    scale: float = 1.0
    stack: bool = False
    smoothed: bool = False
    log: bool = False
    percent: bool = False
    from_zero: bool = False


def _phases(part: str) -> tuple[Curve, ...]:
    return tuple(Curve(f"phases_s.{phase}.{part}", phase) for phase in _PHASES)


CHARTS: tuple[Chart, ...] = (
    Chart(
        "loss",
        "Loss, and held-out loss as points",
        "",
        "loss",
        (Curve("loss", "training"), Curve("heldout_loss", "held-out", "points")),
        smoothed=True,
        log=True,
    ),
    Chart(
        "loss_by_source",
        "Loss per source",
        "",
        "loss",
        (Curve("loss_by_source.*"),),
        smoothed=True,
        log=True,
    ),
    Chart(
        "grad_norm",
        "Gradient norm, before clipping",
        "",
        "loss",
        (Curve("grad_norm"),),
        smoothed=True,
        log=True,
    ),
    Chart(
        "heldout_by_source",
        "Held-out loss per source",
        "",
        "loss",
        (Curve("heldout_loss_by_source.*", style="points"),),
        log=True,
    ),
    Chart(
        "lr",
        "Learning rate",
        "",
        "loss",
        (Curve("lr", "lr"), Curve("lr_by_tower.*")),
    ),
    Chart(
        "grad_norm_by_tower",
        "Gradient norm per tower",
        "",
        "loss",
        (Curve("grad_norm_by_tower.*"),),
        smoothed=True,
        log=True,
    ),
    Chart("vision_loss", "Vision loss", "", "loss", (Curve("vision_loss"),), smoothed=True),
    Chart("loss_scale", "Loss scale (fp16)", "", "loss", (Curve("loss_scale"),), log=True),
    Chart(
        "tokens_per_s", "Tokens per second", "", "speed", (Curve("tokens_per_s"),), smoothed=True
    ),
    Chart(
        "mfu",
        "MFU and HFU",
        "",
        "speed",
        (Curve("mfu", "MFU"), Curve("hfu", "HFU")),
        smoothed=True,
        percent=True,
    ),
    Chart(
        "phases_mean",
        "Phases of a step, mean of the ranks",
        "s",
        "speed",
        _phases("mean"),
        stack=True,
    ),
    Chart(
        "phases_most",
        "Phases of a step, of each the worst rank",
        "s",
        "speed",
        _phases("most"),
        stack=True,
    ),
    Chart(
        "step_s",
        "Time of a step, and of it waiting for data",
        "s",
        "speed",
        (Curve("step_s", "step"), Curve("data_s", "data")),
        smoothed=True,
        log=True,
    ),
    Chart(
        "padding",
        "Padding, and idle ranks",
        "",
        "speed",
        (Curve("padding_fraction", "padding"), Curve("idle_fraction", "idle")),
        smoothed=True,
        percent=True,
    ),
    Chart(
        "memory",
        "Memory of the rank that has most",
        "GiB",
        "devices",
        (
            Curve("memory_bytes.peak.most", "peak"),
            Curve("memory_bytes.reserved.most", "reserved"),
            Curve("memory_bytes.allocated.most", "allocated"),
            Curve("memory_bytes.host.most", "host"),
        ),
        scale=_GIB,
        from_zero=True,
    ),
    Chart(
        "retries",
        "Allocations tried again",
        "",
        "devices",
        (Curve("num_alloc_retries"),),
        from_zero=True,
    ),
    Chart(
        "busy",
        "Devices: time with any kernel (utilisation)",
        "",
        "devices",
        (Curve("devices.*.busy_fraction"),),
        axis="clock",
        percent=True,
    ),
    Chart(
        "device_memory",
        "Devices: memory used",
        "GiB",
        "devices",
        (Curve("devices.*.memory_used_bytes"),),
        axis="clock",
        scale=_GIB,
    ),
    Chart("power", "Devices: power", "W", "devices", (Curve("devices.*.power_w"),), axis="clock"),
    Chart(
        "clock",
        "Devices: clock",
        "MHz",
        "devices",
        (Curve("devices.*.clock_hz"),),
        axis="clock",
        scale=_MB,
    ),
    Chart(
        "temperature",
        "Devices: temperature",
        "°C",
        "devices",
        (Curve("devices.*.temperature_c"),),
        axis="clock",
    ),
    Chart(
        "throttling",
        "Devices: reasons that throttle",
        "",
        "devices",
        (Curve("devices.*.throttle_reasons"),),
        axis="clock",
    ),
    Chart(
        "cores",
        "Host: busy cores of this run",
        "",
        "devices",
        (Curve("ranks_cpu_cores", "ranks"), Curve("loaders_cpu_cores", "loaders")),
        axis="clock",
    ),
    Chart(
        "cpu",
        "Host: all cores",
        "",
        "devices",
        (Curve("cpu_fraction"),),
        axis="clock",
        percent=True,
    ),
    Chart(
        "host_memory",
        "Host: memory",
        "GiB",
        "devices",
        (Curve("memory_available_bytes", "available"), Curve("ranks_memory_bytes", "ranks")),
        axis="clock",
        scale=_GIB,
    ),
    Chart(
        "links",
        "Host: disk and network",
        "MB/s",
        "devices",
        (
            Curve("disk_read_bytes_per_s", "read"),
            Curve("disk_write_bytes_per_s", "written"),
            Curve("network_received_bytes_per_s", "received"),
            Curve("network_sent_bytes_per_s", "sent"),
        ),
        axis="clock",
        scale=_MB,
    ),
)


def charts_of(tab: Tab) -> tuple[Chart, ...]:
    """Return a tab's charts, in order; those of words have none."""
    return tuple(chart for chart in CHARTS if chart.tab == tab)


def first_names(tab: Tab) -> list[str]:
    """Return the names of a tab's charts that are drawn before the others."""
    return [chart.name for chart in charts_of(tab)[:_NUM_FIRST]]


def match(curve: Curve, *, names: list[str]) -> list[tuple[str, str]]:
    """Return the columns that a curve stands for, each with its label."""
    before, star, after = curve.column.partition("*")
    if not star:
        return [(curve.column, curve.label)] if curve.column in names else []
    return [
        (name, name[len(before) : len(name) - len(after)])
        for name in names
        if name.startswith(before) and name.endswith(after) and len(name) > len(before + after)
    ]
