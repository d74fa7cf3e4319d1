"""What was measured of what may be missing: values with None among them in, none of those out."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import fmean
from typing import TypeVar

import numpy as np

Value = TypeVar("Value", int, float, str)


def known(values: Iterable[Value | None]) -> list[Value]:
    """Leave out what was not measured."""
    return [value for value in values if value is not None]


def mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of what was measured, None if nothing was."""
    found = known(values)
    return fmean(found) if found else None


def quantile(values: Iterable[float | None], *, part: float) -> float | None:
    """Return a quantile of what was measured, None if nothing was."""
    found = known(values)
    return float(np.quantile(found, part)) if found else None


def ratio(part: float | None, whole: float | None) -> float | None:
    """Return a share, None where one of both was not measured or the whole is nothing."""
    return part / whole if part is not None and whole else None
