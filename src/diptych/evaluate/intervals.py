"""A mean of right and wrong answers with its bootstrap interval over images.

In: per question a 0 or 1 and the unit it belongs to. Out: `Interval`. Questions on the same image
are not independent, so whole images are drawn, with all their questions.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from diptych.core.records import Interval

CONFIDENCE = 0.95
_BLOCK_DRAWS = 1 << 22  # counts held at once: 32 MiB of int64


def interval(
    correct: Sequence[bool], *, units: Sequence[str], num_resamples: int, seed: int
) -> Interval:
    """Return the mean over questions and the percentile interval over resampled units.

    Args:
        correct: [n], one per question.
        units: [n], the name of the unit (an image) that each question belongs to.
        num_resamples: how many times all units are drawn anew, with replacement.
        seed: of these draws.

    Raises:
        ValueError: there is no question, or the lengths differ.

    Source: Efron and Tibshirani, An Introduction to the Bootstrap, 13.3 (percentile interval), on
        clusters. Differs: units have unlike numbers of questions, so each resample is a ratio of
        sums and the mean stays one over questions.
    """
    if not correct or len(correct) != len(units):
        raise ValueError(
            f"{len(correct)} answers for {len(units)} units: one unit each, at least 1"
        )
    _, unit_of = np.unique(np.asarray(units, dtype=str), return_inverse=True)
    sizes = np.bincount(unit_of)
    hits = np.bincount(unit_of, weights=np.asarray(correct, dtype=np.float64))
    means = _resampled_means(hits, sizes=sizes, num_resamples=num_resamples, seed=seed)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return Interval(value=float(np.mean(correct)), low=float(low), high=float(high), n=len(correct))


def _resampled_means(
    hits: np.ndarray, *, sizes: np.ndarray, num_resamples: int, seed: int
) -> np.ndarray:
    generator = np.random.default_rng(seed)
    num_units = len(sizes)
    block = max(1, _BLOCK_DRAWS // num_units)
    means = []
    for start in range(0, num_resamples, block):
        # How often each unit is drawn: one multinomial row per resample instead of the draws.
        counts = generator.multinomial(
            num_units,
            np.full(num_units, 1 / num_units),
            size=min(block, num_resamples - start),
        )
        means.append((counts @ hits) / (counts @ sizes))
    return np.concatenate(means)
