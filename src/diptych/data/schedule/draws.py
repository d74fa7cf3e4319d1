"""Random numbers that depend on nothing but a path of integers, such as (seed, epoch, window)."""

from __future__ import annotations

import numpy as np


class Draws:
    """Random numbers from a path of integers.

    Only the generator's raw bits are used: numpy promises them to stay the same over versions,
    which it does not for `Generator.permutation`.
    """

    def __init__(self, *path: int) -> None:
        entropy = [number % 2**64 for number in path]
        self._bits = np.random.Philox(np.random.SeedSequence(entropy))

    def permutation(self, size: int) -> np.ndarray:
        """Return [size] int64, the numbers below `size` in random order."""
        return np.argsort(self._bits.random_raw(size), kind="stable")

    def uniform(self, size: int) -> np.ndarray:
        """Return [size] float64 in [0, 1)."""
        return (self._bits.random_raw(size) >> np.uint64(11)) * 2.0**-53
