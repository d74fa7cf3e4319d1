"""Whether saves wait or go on beside training: seconds of steps and saves in, the cheaper way out.

A save that waits loses the time it takes. One beside training loses its stall, and what the steps
take longer while it is under way: where no core and no memory bandwidth is spare, that can be more.
"""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import Literal

Saving = Literal["auto", "async", "sync"]

_NUM_STEPS = 33
"""Steps without a save that the usual time is the median of."""
_NUM_SAVES = 5
_RETRY_SAVES = 12
"""After so many saves the way that lost more is tried again: a run's surroundings change."""


class Pace:
    """What saves have lost so far, by either way, by one rank's clock."""

    def __init__(self, saving: Saving) -> None:
        self._saving = saving
        self._steps: deque[float] = deque(maxlen=_NUM_STEPS)
        self._lost: dict[bool, deque[float]] = {
            way: deque(maxlen=_NUM_SAVES) for way in (False, True)
        }
        self._under_way: list[float] = []
        self._stall_s: float | None = None
        self._num_saves = 0

    @property
    def is_async(self) -> bool:
        """Whether the next save should go on beside training."""
        if self._saving != "auto":
            return self._saving == "async"
        for way in (False, True):
            if not self._lost[way]:
                return way
        cheaper = self.lost_s(True) <= self.lost_s(False)
        return cheaper != (self._num_saves % _RETRY_SAVES == 0)

    def lost_s(self, is_async: bool) -> float:
        """Return the seconds that a save of one way loses, as measured; inf before there is one."""
        lost = self._lost[is_async]
        return median(lost) if lost else float("inf")

    def note_step(self, step_s: float) -> None:
        """Take in a step's seconds."""
        if self._stall_s is None:
            self._steps.append(step_s)
        else:
            self._under_way.append(step_s)

    def begin(self, stall_s: float) -> None:
        """Take in that a save goes on beside training from now, and what training waited for it."""
        self._stall_s, self._under_way = stall_s, []

    def end(self) -> None:
        """Take in that it is done."""
        if self._stall_s is None:
            return
        slowed_s = 0.0
        if self._steps:
            slowed_s = sum(self._under_way) - len(self._under_way) * median(self._steps)
        self._note(self._stall_s + max(0.0, slowed_s), is_async=True)
        self._stall_s = None

    def note_waited(self, stall_s: float) -> None:
        """Take in a save that training waited for."""
        self._note(stall_s, is_async=False)

    def _note(self, lost_s: float, *, is_async: bool) -> None:
        self._lost[is_async].append(lost_s)
        self._num_saves += 1
