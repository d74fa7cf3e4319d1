"""Two runs side by side: what one lacks to be as fast as the other, for its ranks and its rows."""

from __future__ import annotations

from typing import Literal

from diptych.core.records.base import Record

PartName = Literal[
    "communication",
    "straggling",
    "imbalance",
    "data",
    "computing",
    "update",
    "checkpoint",
    "heldout",
    "other",
]


class Part(Record):
    """A part of a step's time: seconds expected from the other run, and seconds taken.

    `missing` is what it takes of the speedup. `communication` is the exchange itself; what ranks
    wait for each other is `imbalance` as far as the rows that they were given cost unequally, and
    `straggling` beyond.
    """

    name: PartName
    expected_s: float
    took_s: float
    missing: float

    @property
    def lost_s(self) -> float:
        """Return the seconds above what was expected."""
        return self.took_s - self.expected_s


class Comparison(Record):
    """`run_id` beside `against_id`: tokens per second over each other, and what explains it.

    `ideal` is the speedup that the ranks promise; parts add up to what is missing of it, the
    largest first. `step_s` is the mean with checkpoints and held-out losses. `settings` are lines
    of what differs, from the other run to this one.
    """

    run_id: str
    against_id: str
    num_ranks: int
    against_num_ranks: int
    step_s: float
    against_step_s: float
    speedup: float
    ideal: float
    verdict: str
    parts: tuple[Part, ...] = ()
    settings: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
