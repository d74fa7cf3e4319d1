"""`memory`: a device or a host has next to no memory left."""

from __future__ import annotations

from diptych.core.records import Change, Finding
from diptych.monitor.diagnose.findings import HIGH, LOW, change, finding, retried, said
from diptych.monitor.diagnose.rules.fragmentation import LEAST as FRAGMENTED
from diptych.monitor.diagnose.settings import Settings
from diptych.monitor.diagnose.signals import Signals

FULL = 0.97
"""A device so full fails at the next longer row."""
FREE = 0.05
"""A host with less memory available begins to kill processes."""


def judge_memory(signals: Signals, *, settings: Settings) -> Finding | None:
    """Judge whether memory runs out, on devices (fragmentation aside) or on a host."""
    free, filled, retries = _numbers(signals)
    is_host = free is not None and free < FREE
    is_device = _is_used_up(signals, filled=filled, retries=retries)
    if not is_host and not is_device:
        return None
    changes = _of_device(settings) if is_device else _of_host(settings)
    return finding(
        "memory",
        "A device's memory is full" if is_device else "A host runs out of memory",
        cost=None,
        confidence=HIGH if retries or is_host else LOW + 0.2,
        evidence=(
            said("the fullest device uses {} of its memory", filled),
            retried(retries),
            said("of a host's memory {} was available at least", free),
        ),
        changes=changes,
    )


def _numbers(signals: Signals) -> tuple[float | None, float | None, int]:
    """Return what a host has free, what a device has filled, how often its allocator retried."""
    free = None if signals.hosts is None else signals.hosts.free_memory
    filled = None if signals.devices is None else signals.devices.memory
    retries = None if signals.memory is None else signals.memory.num_retries
    return free, filled, retries or 0


def _is_used_up(signals: Signals, *, filled: float | None, retries: int) -> bool:
    """Whether a device is full of tensors: what is fragmented is another bound."""
    gap = None if signals.memory is None else signals.memory.gap
    if gap is not None and gap >= FRAGMENTED:
        return False
    return retries > 0 or (filled or 0.0) >= FULL


def _of_device(settings: Settings) -> list[Change | None]:
    return [
        change(
            "plan.layout.micro_batch",
            max(1, settings.micro_batch // 2),
            why="half the activations at a time, the same batches",
        )
        if settings.micro_batch > 1
        else None,
        change("plan.layout.memory.loss", "chunked", why="logits of a part of the tokens at a time")
        if settings.loss == "whole"
        else None,
        change(
            "plan.layout.memory.recompute",
            "blocks",
            why="activations are computed again in backward (about a third more time)",
        )
        if settings.recompute == "none"
        else None,
        change("plan.layout.engine", "fsdp2", why="states are shared out over ranks")
        if settings.engine == "ddp" and settings.num_ranks > 1
        else None,
    ]


def _of_host(settings: Settings) -> list[Change | None]:
    return [
        change("train.num_workers", settings.num_workers // 2, why="fewer loaders hold batches")
        if settings.num_workers
        else None,
    ]
