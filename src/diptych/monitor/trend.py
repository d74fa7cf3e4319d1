"""Whether a noisy series grows without end: values in, a rise out, once there is one. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import pairwise

_WARMUP_WINDOWS = 2
_NUM_WINDOWS = 8
_CONCORDANT = 0.9
_SHARE = 0.05
_GOES_ON = 0.7
_ONE_STEP = 0.5


@dataclass(frozen=True)
class Rise:
    """From which floor to which a series rose, over how many values."""

    first: float
    last: float
    num_values: int


class Trend:
    """Finds growth of a series' floor: the least value of each of the last eight windows.

    What is held for a moment does not move a floor. It has to grow in nearly every window
    (Kendall's tau), by 5% and `least` at least, in the later half as in the earlier (what warms up
    slows down), and not in one step.

    Args:
        least: the smallest growth that matters, in the values' unit.
        window: values in a window.
    """

    def __init__(self, *, least: float, window: int = 50) -> None:
        self._least = least
        self._window = window
        self._values: list[float] = []
        self._num_skipped = 0
        self._floors: deque[float] = deque(maxlen=_NUM_WINDOWS)

    def add(self, value: float) -> bool | None:
        """Take a value; returns whether the floors rise, None within a window."""
        self._values.append(value)
        if len(self._values) < self._window:
            return None
        floor, self._values = min(self._values), []
        if self._num_skipped < _WARMUP_WINDOWS:
            self._num_skipped += 1
            return None
        self._floors.append(floor)
        return self.rise is not None

    @property
    def rise(self) -> Rise | None:
        """The rise, if the floors rise without end."""
        floors = list(self._floors)
        if len(floors) < _NUM_WINDOWS or not self.is_rising:
            return None
        pairs = [(a, b) for place, a in enumerate(floors) for b in floors[place + 1 :]]
        if sum(b > a for a, b in pairs) < _CONCORDANT * len(pairs):
            return None
        total = floors[-1] - floors[0]
        if max(b - a for a, b in pairwise(floors)) > _ONE_STEP * total:
            return None
        half = _NUM_WINDOWS // 2
        early, late = floors[half - 1] - floors[0], floors[-1] - floors[half]
        if late < _GOES_ON * early:
            return None
        return Rise(floors[0], floors[-1], num_values=self._window * _NUM_WINDOWS)

    @property
    def is_rising(self) -> bool:
        """Whether the floors rose by as much as matters, in whatever way."""
        if not self._floors:
            return False
        first, last = self._floors[0], self._floors[-1]
        return last - first >= max(self._least, _SHARE * first)
