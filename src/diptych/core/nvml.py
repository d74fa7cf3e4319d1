"""NVIDIA's management library: its module, what of it is asked in several places. No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

BENIGN_THROTTLE = 0x1 | 0x2
"""Idle, and clocks that an application has set."""

_THROTTLE_REASONS = {
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
    0x200: "board_limit",
    0x400: "reliability",
}


def open_nvml() -> Any:
    """Return NVML's module, initialised; None where it finds no GPU."""
    import pynvml

    try:
        pynvml.nvmlInit()
        return pynvml if pynvml.nvmlDeviceGetCount() else None
    except pynvml.NVMLError:
        return None


def ask(nvml: Any, question: Callable[[], Any]) -> Any:
    """Ask NVML what not every device answers; None where it does not."""
    try:
        return question()
    except nvml.NVMLError:
        return None


def name_throttle_reasons(reasons: int) -> tuple[str, ...]:
    """Name what slows a device down, by NVML's names; idle and chosen clocks are left out."""
    named = tuple(name for bit, name in _THROTTLE_REASONS.items() if reasons & bit)
    unknown = reasons & ~BENIGN_THROTTLE & ~sum(_THROTTLE_REASONS)
    return (*named, f"{unknown:#x}") if unknown else named


def select_visible(variable: str | None, *, uuids: Sequence[str]) -> list[int]:
    """Return the indices that CUDA_VISIBLE_DEVICES leaves, as CUDA reads it.

    Entries are indices or beginnings of UUIDs; the first that names no device ends the list.
    """
    if variable is None:
        return list(range(len(uuids)))
    chosen: list[int] = []
    for entry in (part.strip() for part in variable.split(",")):
        if entry.isdigit() and int(entry) < len(uuids):
            chosen.append(int(entry))
            continue
        matches = [i for i, uuid in enumerate(uuids) if entry and uuid.startswith(entry)]
        if len(matches) != 1:
            break
        chosen.append(matches[0])
    return chosen
