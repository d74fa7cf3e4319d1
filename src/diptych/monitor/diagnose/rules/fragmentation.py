"""`fragmentation`: the allocator holds memory that no tensor can use."""

from __future__ import annotations

from diptych.core.records import Finding
from diptych.core.units import format_bytes
from diptych.monitor.diagnose.findings import change, finding, percent, ramp, retried
from diptych.monitor.diagnose.settings import Settings
from diptych.monitor.diagnose.signals import Signals

LEAST, SURE = 0.25, 0.5
"""Share of the memory held that no tensor needed even at the peak."""
FULL = 0.85
"""A device so full has no room for what fragmentation takes."""


def judge_fragmentation(signals: Signals, *, settings: Settings) -> Finding | None:
    """Judge the gap between what is held and what is used, where memory is scarce."""
    memory = signals.memory
    if memory is None or memory.gap is None or memory.gap < LEAST or not _is_scarce(signals):
        return None
    held = memory.reserved_bytes or 0.0
    return finding(
        "fragmentation",
        "Memory is fragmented",
        cost=None,
        confidence=ramp(memory.gap, least=LEAST, sure=SURE),
        evidence=(
            f"up to {format_bytes(held)} are held, and usually {percent(memory.gap)} of it of no "
            "use even at the peak",
            retried(memory.num_retries),
        ),
        changes=[
            change(
                "plan.layout.memory.allocator",
                "expandable_segments:True",
                why="segments grow instead of lying beside each other",
            )
            if "expandable_segments" not in (settings.allocator or "")
            else None,
            change(
                "plan.layout.memory.token_multiple",
                max(64, settings.token_multiple),
                why="fewer shapes, whose memory is used again",
            ),
            change(
                "plan.layout.memory.release_cache_every_steps",
                100,
                why="unused memory is given back now and then",
            ),
        ],
    )


def _is_scarce(signals: Signals) -> bool:
    memory, devices = signals.memory, signals.devices
    retried = memory is not None and bool(memory.num_retries)
    filled = None if devices is None else devices.memory
    return retried or (filled is not None and filled >= FULL)
