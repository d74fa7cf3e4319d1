"""Which checkpoints stay: steps and scores in, the steps to keep out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
        kept |= _first_of_each(by_step, every_steps=keep.every_steps)
    if keep.best is not None:
        kept |= _best_of(by_step)
    return kept


def _first_of_each(by_step: Sequence[Saved], *, every_steps: int) -> set[int]:
    first: dict[int, int] = {}
    for each in by_step:
        first.setdefault(each.step // every_steps, each.step)
    return {step for multiple, step in first.items() if multiple > 0}


def _best_of(by_step: Sequence[Saved]) -> set[int]:
    scored = [(each.score, each.step) for each in by_step if each.score is not None]
    return {min(scored)[1]} if scored else set()
