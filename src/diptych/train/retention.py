"""Which checkpoints stay: steps and scores in, the steps to keep out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint: its step, and its score where one was measured (lower is better)."""

    step: int
    score: float | None = None


@dataclass(frozen=True)
class Keep:
    """What is kept.

    Attributes:
        last: so many of the newest.
        every_steps: the first one at or after each multiple of so many steps; None: none of those.
        best: the name of the score whose lowest is kept; None: none.
    """

    last: int
    every_steps: int | None = None
    best: str | None = None


def steps_to_keep(saved: Iterable[Saved], *, keep: Keep) -> set[int]:
    """Choose among checkpoints; what was kept for its multiple or as the best stays chosen."""
    by_step = sorted(saved, key=lambda each: each.step)
    kept = {each.step for each in by_step[-keep.last :]}
    if keep.every_steps is not None:
        first_of: dict[int, int] = {}
        for each in by_step:
            first_of.setdefault(each.step // keep.every_steps, each.step)
        kept |= {step for multiple, step in first_of.items() if multiple > 0}
    scored = [each for each in by_step if each.score is not None]
    if keep.best is not None and scored:
        kept.add(min(scored, key=lambda each: (each.score, each.step)).step)
    return kept
