"""How a run learns and what memory it holds: step records in, trends and counts out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from diptych.core.records import Over, Record, StepRecord
from diptych.monitor.diagnose.measured import known, quantile, ratio

_MIN_LOSSES = 20
_PARTS = 10
"""A run is cut into so many parts of equal length, and the median taken of each."""
_SPIKE = 10.0


class Learning(Record):
    """Loss, gradient norm and what was not finite.

    `nonfinite` are steps of which loss or gradient was not finite, `searching` how many more were
    skipped while fp16's scale was sought. `loss_parts` and `grad_parts` are medians of ten parts in
    order, empty of short runs; `loss_noise` is how far a step's loss is from its part's median,
    usually. `clipped` is the share of steps whose gradient was scaled down, None without a limit.
    `spikes` are steps of which the gradient norm is ten times the usual.
    """

    nonfinite: tuple[int, ...]
    searching: int
    culprits: tuple[str, ...]
    loss_parts: tuple[float, ...]
    loss_noise: float | None
    grad_norm: float | None
    grad_parts: tuple[float, ...]
    clipped: float | None
    spikes: tuple[int, ...]
    lr: float
    highest_lr: float


class Memory(Record):
    """Memory of the ranks' devices, the fullest rank's.

    `gap` is the share of what torch holds that no tensor needed even at the peak. `num_retries`
    counts how often, in the window, the allocator had to give back everything to find room.
    """

    reserved_bytes: float | None
    peak_bytes: float | None
    gap: float | None
    num_retries: int | None


def measure_learning(records: Sequence[StepRecord], *, max_grad_norm: float | None) -> Learning:
    """Sum up what was learnt; records must not be empty."""
    nonfinite = [each for each in records if _is_nonfinite(each)]
    losses = np.array(known(each.loss for each in records))
    norms = np.array(known(each.grad_norm for each in records))
    usual = quantile(norms, part=0.5)
    parts = _parts(losses)
    return Learning(
        nonfinite=tuple(each.step for each in nonfinite),
        searching=sum(map(_is_search, records)),
        culprits=tuple(dict.fromkeys(known(each.nonfinite for each in nonfinite))),
        loss_parts=parts,
        loss_noise=_noise(losses, parts=parts),
        grad_norm=usual,
        grad_parts=_parts(norms),
        clipped=_clipped(norms, limit=max_grad_norm),
        spikes=_spikes(records, usual=usual),
        lr=records[-1].lr,
        highest_lr=max(record.lr for record in records),
    )


def measure_memory(records: Sequence[StepRecord]) -> Memory | None:
    """Sum up the devices' memory; None where it was not measured."""
    held = [each.memory_bytes for each in records if {"reserved", "peak"} <= set(each.memory_bytes)]
    retries = _retries(records)
    if not held and retries is None:
        return None
    used = quantile((ratio(each["peak"].most, each["reserved"].most) for each in held), part=0.5)
    return Memory(
        reserved_bytes=_most(held, name="reserved"),
        peak_bytes=_most(held, name="peak"),
        gap=None if used is None else 1.0 - used,
        num_retries=retries,
    )


def _spikes(records: Sequence[StepRecord], *, usual: float | None) -> tuple[int, ...]:
    least = _SPIKE * (usual or float("inf"))
    return tuple(each.step for each in records if (each.grad_norm or 0.0) > least)


def _most(held: Sequence[dict[str, Over]], *, name: str) -> float | None:
    return max((each[name].most for each in held), default=None)


def _clipped(norms: np.ndarray, *, limit: float | None) -> float | None:
    return float(np.mean(norms > limit)) if limit and len(norms) else None


def _retries(records: Sequence[StepRecord]) -> int | None:
    """Add up what the count gained, which begins anew with every attempt."""
    retries = [
        (each.attempt, each.num_alloc_retries)
        for each in records
        if each.num_alloc_retries is not None
    ]
    if not retries:
        return None
    gained = 0
    for attempt in {attempt for attempt, _ in retries}:
        counts = [count for each, count in retries if each == attempt]
        gained += max(0, counts[-1] - counts[0])
    return gained


def _is_nonfinite(record: StepRecord) -> bool:
    return (record.loss is None or record.grad_norm is None) and not _is_search(record)


def _is_search(record: StepRecord) -> bool:
    """Whether a step overflowed as fp16's loss scale was too large: the loss itself is fine."""
    return record.skipped and record.loss_scale is not None and record.loss is not None


def _parts(values: np.ndarray) -> tuple[float, ...]:
    if len(values) < _MIN_LOSSES:
        return ()
    return tuple(float(np.median(part)) for part in np.array_split(values, _PARTS))


def _noise(losses: np.ndarray, *, parts: Sequence[float]) -> float | None:
    """Return the median distance of a loss from its part's median, as a standard deviation."""
    if not parts:
        return None
    apart = [
        np.abs(part - middle)
        for part, middle in zip(np.array_split(losses, _PARTS), parts, strict=True)
    ]
    return 1.4826 * float(np.median(np.concatenate(apart)))
