"""In: a run's folder. Out: the numbers of its steps as arrays, thinned for a page."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from diptych.core.records import StepRecord
from diptych.monitor.run_folder import RunFolder


@dataclass(frozen=True)
class Steps:
    """The records of every logged step, in step order."""

    records: tuple[StepRecord, ...]

    def column(self, name: str) -> np.ndarray:
        """Return one field of every step as [num_steps] float64; what was not measured is nan."""
        values = [getattr(record, name) for record in self.records]
        return np.array([np.nan if value is None else value for value in values], dtype=np.float64)

    def of_source(self, name: str, *, source: str) -> np.ndarray:
        """Return one source's entry of a field as [num_steps] float64; nan where there is none."""
        values = [getattr(record, name).get(source, np.nan) for record in self.records]
        return np.array(values, dtype=np.float64)

    def median(self, name: str) -> float | None:
        """Return the median of a field over the steps that measured it, or None."""
        values = self.column(name)
        values = values[np.isfinite(values)]
        return float(np.median(values)) if len(values) else None


def read_steps(run_folder: Path) -> Steps:
    """Read the step log of a run; one that is not there gives no records."""
    return Steps(tuple(RunFolder(run_folder).read_steps()))


def thin(
    values: np.ndarray, *, num_points: int, reduce: Literal["mean", "max"] = "mean"
) -> np.ndarray:
    """Reduce [n] values to at most `num_points` by the mean (or maximum) of equal runs of them.

    A run of values without any that was measured stays nan. The last run may be shorter.
    """
    size = -(-len(values) // num_points) if len(values) else 1
    if size == 1:
        return values
    reduced = []
    for start in range(0, len(values), size):
        part = values[start : start + size]
        part = part[~np.isnan(part)]
        reduced.append(getattr(part, reduce)() if len(part) else np.nan)
    return np.array(reduced)
