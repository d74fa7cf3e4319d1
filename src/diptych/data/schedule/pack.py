"""Pack samples into rows of a fixed length: the longest first, each into the fullest row with room.

In: what each sample takes of two budgets, tokens and patches. Out: the row of each sample. Knows
nothing of shards, epochs or ranks.
"""

from __future__ import annotations

from bisect import bisect_left

import numpy as np

from diptych.data.schedule.ragged import Rows

_NUM_TRIED = 16
"""Rows, the fullest first, that are asked for room under the second budget."""


def measure_load(
    num_tokens: np.ndarray | int,
    *,
    num_patches: np.ndarray | int,
    max_tokens: int,
    max_patches: int | None,
) -> np.ndarray:
    """Say how many rows the scarcer budget alone would need.

    Args:
        num_tokens: [N], of samples, or of many samples together.
        num_patches: [N]
        max_tokens: what a row holds.
        max_patches: what a row holds; None: any number.

    Returns:
        [N] float64.
    """
    tokens = np.asarray(num_tokens) / max_tokens
    return tokens if max_patches is None else np.maximum(tokens, num_patches / max_patches)


def pack(
    num_tokens: np.ndarray,
    *,
    num_patches: np.ndarray,
    max_tokens: int,
    max_patches: int | None,
    jitter: np.ndarray,
) -> Rows:
    """Pack samples by best fit, in the order of falling load.

    Best fit is by the budget that is scarcer for all samples together; the other is checked.

    Args:
        num_tokens: [N] of each sample, at most `max_tokens`.
        num_patches: [N] of each sample, at most `max_patches`.
        max_tokens: what a row holds.
        max_patches: what a row holds; None: any number.
        jitter: [N] factors near 1 that loads are multiplied with before they are compared, so that
            rows differ where they differ.

    Returns:
        Rows of sample numbers below N, each once.
    """
    sizes, others = num_tokens, num_patches
    room, other_room = max_tokens, max_patches
    if other_room is None:
        others, other_room = np.zeros_like(num_tokens), 0
    elif num_patches.sum() / other_room > num_tokens.sum() / max_tokens:
        sizes, others, room, other_room = num_patches, num_tokens, other_room, max_tokens
    load = measure_load(
        num_tokens, num_patches=num_patches, max_tokens=max_tokens, max_patches=max_patches
    )
    order = np.argsort(-load * jitter, kind="stable")
    rows = _best_fit(
        sizes[order].tolist(), others=others[order].tolist(), room=room, other_room=other_room
    )
    row_of = np.empty(len(order), dtype=np.int64)
    row_of[order] = rows
    starts = np.cumsum([0, *np.bincount(row_of)], dtype=np.int64)
    return Rows(np.argsort(row_of, kind="stable"), starts)


def _best_fit(sizes: list[int], *, others: list[int], room: int, other_room: int) -> list[int]:
    """Return the row of each sample, in the order given."""
    row_of: list[int] = []
    others_left: list[int] = []
    # Rows by what is free in them, and those numbers ascending.
    rows_by_free: dict[int, list[int]] = {}
    frees: list[int] = []
    for size, other in zip(sizes, others, strict=True):
        place = bisect_left(frees, size)
        for place in range(place, min(place + _NUM_TRIED, len(frees))):  # noqa: B020
            free = frees[place]
            rows = rows_by_free[free]
            if others_left[rows[-1]] >= other:
                row = rows.pop()
                if not rows:
                    del rows_by_free[free], frees[place]
                break
        else:
            row, free = len(others_left), room
            others_left.append(other_room)
        others_left[row] -= other
        row_of.append(row)
        left = free - size
        if left in rows_by_free:
            rows_by_free[left].append(row)
        else:
            rows_by_free[left] = [row]
            frees.insert(bisect_left(frees, left), left)
    return row_of


def resize(rows: Rows, *, num_rows: int, fills: np.ndarray) -> tuple[Rows, np.ndarray]:
    """Bring packed rows to a given number.

    Args:
        rows: the packed rows.
        num_rows: how many there shall be, at most as many as there are samples. Where there are
            fewer, the rows with most samples are halved; where there are more, the emptiest go.
        fills: [number of rows] how full each is.

    Returns:
        The rows, and the samples of those that went.
    """
    if len(rows) > num_rows:
        order = np.argsort(-fills, kind="stable")
        return rows.take(order[:num_rows]), rows.take(order[num_rows:]).samples
    starts = rows.starts
    while (missing := num_rows - (len(starts) - 1)) > 0:
        counts = np.diff(starts)
        halved = np.argsort(-counts, kind="stable")[:missing]
        halved = halved[counts[halved] > 1]
        starts = np.sort(np.concatenate([starts, starts[halved] + counts[halved] // 2]))
    return Rows(rows.samples, starts), rows.samples[:0]
