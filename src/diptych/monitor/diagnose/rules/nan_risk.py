"""`nan_risk`: losses or gradients that are not finite, or gradients on their way there."""

from __future__ import annotations

from diptych.core.records import Change, Finding
from diptych.monitor.diagnose.findings import HIGH, change, finding
from diptych.monitor.diagnose.settings import Settings
from diptych.monitor.diagnose.signals import Signals

GROWTH = 50.0
"""The last tenth's gradient norm over the usual one, above which it is about to overflow."""
_CONFIDENCE = (0.6, 0.85, HIGH)
"""By how many steps were not finite: none, one, more."""


def judge_nan_risk(signals: Signals, *, settings: Settings) -> Finding | None:
    """Judge steps that were not finite; without any, whether the gradient grows out of hand."""
    learning = signals.learning
    num = len(learning.nonfinite)
    if not num and _growth(signals) < GROWTH:
        return None
    return finding(
        "nan_risk",
        "Losses or gradients are not finite" if num else "Gradients grow out of hand",
        cost=None,
        confidence=_CONFIDENCE[min(num, 2)],
        evidence=_evidence(signals),
        steps=learning.nonfinite or learning.spikes,
        changes=_changes(settings, signals=signals),
    )


def _evidence(signals: Signals) -> list[str]:
    learning, grows = signals.learning, _growth(signals)
    told = []
    if learning.nonfinite:
        num, first = len(learning.nonfinite), ", ".join(map(str, learning.nonfinite[:8]))
        told.append(
            f"loss or gradient was not finite in {num} steps, which changed nothing: {first}"
        )
    if learning.culprits:
        told.append(f"what was first not finite: {', '.join(learning.culprits[:3])}")
    if grows >= GROWTH:
        told.append(f"the gradient norm has grown to {grows:.3g} times what is usual")
    if learning.grad_norm is not None:
        told.append(f"the gradient norm is usually {learning.grad_norm:.3g}")
    return told


def _changes(settings: Settings, *, signals: Signals) -> list[Change | None]:
    return [
        change("train.name_nonfinite", True, why="says which module makes the first NaN")
        if not settings.name_nonfinite and not signals.learning.culprits
        else None,
        change("plan.layout.precision", "bf16", why="has fp32's range, so nothing overflows")
        if settings.precision == "fp16"
        else None,
        change(
            "plan.layout.mixed_precision.keep_fp32",
            "[norms, attention]",
            why="norms and softmax keep fp32's precision",
        )
        if settings.precision != "fp32"
        else None,
        change("train.optimizer.lr", f"{settings.lr / 2:.3g}", why="smaller updates (a new run)"),
        change(
            "train.optimizer.warmup_steps",
            max(50, 2 * settings.warmup_steps),
            why="the first updates are small for longer (a new run)",
        ),
    ]


def _growth(signals: Signals) -> float:
    """Return the last part's gradient norm over the usual one; 0 for short runs."""
    learning = signals.learning
    if not learning.grad_parts or not learning.grad_norm:
        return 0.0
    return learning.grad_parts[-1] / learning.grad_norm
