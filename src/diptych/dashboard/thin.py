"""Curves of as many points as a screen shows: arrays in, shorter arrays out; extremes stay."""

from __future__ import annotations

from typing import Any

import numpy as np

MOST_POINTS = 2000


def in_view(x: np.ndarray, *, view: tuple[float, float] | None) -> slice:
    """Return which part of a rising x is in view, with one point more at each side."""
    if view is None:
        return slice(0, len(x))
    first, last = np.searchsorted(x, view, side="left"), np.searchsorted(x, view[1], side="right")
    return slice(max(0, int(first[0]) - 1), int(last) + 1)


def thin(x: np.ndarray, y: np.ndarray, *, most: int = MOST_POINTS) -> tuple[np.ndarray, np.ndarray]:
    """Return at most so many points of a curve: of each of equal parts its least and its greatest.

    Args:
        x: [N], in order.
        y: [N]; what is not finite is left out.
        most: at least 2.

    Returns:
        x and y, [M] each, M <= most; points of the curve, in order.
    """
    finite = np.isfinite(y)
    if not finite.all():
        x, y = x[finite], y[finite]
    if len(y) <= most:
        return x, y
    num_parts = most // 2
    width = -(-len(y) // num_parts)
    num_parts = -(-len(y) // width)
    padded = np.pad(y, (0, num_parts * width - len(y)), mode="edge").reshape(num_parts, width)
    begins = np.arange(num_parts) * width
    chosen = np.concatenate([begins + padded.argmin(axis=1), begins + padded.argmax(axis=1)])
    chosen = np.unique(np.minimum(chosen, len(y) - 1))
    return x[chosen], y[chosen]


def means(
    x: np.ndarray, values: np.ndarray, *, most: int = MOST_POINTS
) -> tuple[np.ndarray, np.ndarray]:
    """Average rows over equal parts of a curve, for what is stacked: sums stay sums.

    Args:
        x: [N], in order.
        values: [N, K]; what is not finite counts as not there, and is 0 where nothing else is.
        most: parts, at most.

    Returns:
        x of the parts, [M], and their means, [M, K].
    """
    if len(x) == 0:
        return x, values
    width = -(-len(x) // most)
    begins = np.arange(0, len(x), width)
    finite = np.isfinite(values)
    sums = np.add.reduceat(np.where(finite, values, 0.0), begins, axis=0)
    counts = np.add.reduceat(np.isfinite(values).any(axis=1).astype(np.int64), begins)
    return x[begins], sums / np.maximum(counts, 1)[:, None]


def smooth(y: np.ndarray, *, width: int) -> np.ndarray:
    """Average each point with its neighbours, `width` in all; what is not finite stays out."""
    if width <= 1 or len(y) == 0:
        return y
    from scipy.ndimage import uniform_filter1d

    finite = np.isfinite(y)
    filled: Any = np.where(finite, y, 0.0).astype(np.float64)
    sums = uniform_filter1d(filled, width, mode="constant")
    share = uniform_filter1d(finite.astype(np.float64), width, mode="constant")
    with np.errstate(invalid="ignore", divide="ignore"):
        averaged = sums / share
    return np.where(finite, averaged, np.nan)
