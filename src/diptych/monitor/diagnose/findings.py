"""What rules make findings with: shares as words, steps as ranges, confidence by distance."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from diptych.core.records import Bound, Change, Finding

LOW, HIGH = 0.5, 0.95
"""The confidence of what only just reaches its threshold, and of what is far beyond it."""


def ramp(value: float, *, least: float, sure: float) -> float:
    """Return the confidence in a value: `LOW` at `least`, `HIGH` at `sure` and beyond.

    `sure` may be below `least`, where small values are the bad ones.
    """
    part = min(1.0, max(0.0, (value - least) / (sure - least)))
    return LOW + (HIGH - LOW) * part


def percent(share: float) -> str:
    """Write a share as '12%', small ones as '0.4%'."""
    return f"{100 * share:.0f}%" if share >= 0.0995 or not share else f"{100 * share:.1f}%"


def ranges(steps: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Join steps that follow each other into (first, last)."""
    joined: list[tuple[int, int]] = []
    for step in sorted(set(steps)):
        if joined and step == joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], step)
        else:
            joined.append((step, step))
    return tuple(joined)


def said(text: str, value: float | None) -> str | None:
    """Fill a number into a sentence, as `{}` a share; None where it was not measured."""
    return None if value is None else text.format(percent(value))


def retried(num: int | None) -> str | None:
    """Say how often the allocator had to retry; None where it had not, or nobody counted."""
    return f"the allocator gave everything back {num} times to find room" if num else None


def change(setting: str, to: object, *, why: str, gain: float | None = None) -> Change:
    """Make a change; a gain is a share of the time."""
    return Change(
        setting=setting,
        to=str(to).lower() if isinstance(to, bool) else str(to),
        why=why,
        gain=None if gain is None else round(min(1.0, max(0.0, gain)), 4),
    )


def finding(
    bound: Bound,
    title: str,
    *,
    cost: float | None,
    confidence: float,
    evidence: Sequence[str | None],
    steps: Iterable[int] = (),
    changes: Sequence[Change | None] = (),
) -> Finding:
    """Make a finding: evidence and changes that are None are left out, the largest gain first."""
    given = [each for each in changes if each is not None]
    given.sort(key=lambda each: -1.0 if each.gain is None else each.gain, reverse=True)
    return Finding(
        bound=bound,
        title=title,
        cost=None if cost is None else round(min(1.0, max(0.0, cost)), 4),
        confidence=round(confidence, 3),
        evidence=tuple(each for each in evidence if each is not None),
        steps=ranges(steps),
        changes=tuple(given),
    )
