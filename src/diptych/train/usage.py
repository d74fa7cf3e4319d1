"""A rank's memory, on its device and its host, as numbers that travel with a step's others.

What a device does not tell is NaN on the way, and missing in a record.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import psutil
import torch

from diptych.core.records import Over

_KINDS = ("allocated", "reserved", "peak", "host")
NUM_NUMBERS = len(_KINDS) + 1


class Memory:
    """Reads what this process holds of a device's memory and of the host's."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._process = psutil.Process()

    def read(self) -> list[float]:
        """Return bytes allocated, reserved, at the peak since the last call, and of the host.

        And how often the device's allocator had to try again.
        """
        host = float(self._process.memory_info().rss)
        if self._device.type != "cuda":
            return [math.nan, math.nan, math.nan, host, math.nan]
        found = torch.cuda.memory_stats(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        return [
            float(found["allocated_bytes.all.current"]),
            float(found["reserved_bytes.all.current"]),
            float(found["allocated_bytes.all.peak"]),
            host,
            float(found["num_alloc_retries"]),
        ]


def over(values: np.ndarray) -> Over | None:
    """Return what one quantity is over ranks, [world size] float64; None where it is missing."""
    if np.isnan(values).any():
        return None
    rank = int(values.argmax())
    return Over(float(values.min()), float(values.mean()), float(values[rank]), rank)


def over_ranks(numbers: np.ndarray) -> dict[str, Any]:
    """Return the fields of a record.

    Args:
        numbers: [world size, NUM_NUMBERS] float64, what `Memory.read` gave on each rank.
    """
    found = {kind: over(numbers[:, column]) for column, kind in enumerate(_KINDS)}
    retries = numbers[:, -1].max()
    return {
        "memory_bytes": {kind: each for kind, each in found.items() if each is not None},
        "num_alloc_retries": None if math.isnan(retries) else int(retries),
    }
