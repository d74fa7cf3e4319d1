"""What ranks hold and send, measured by the benchmarks' own function, for tests to compare."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def measure_steps(cells: list[dict[str, Any]]) -> list[Any]:
    """Train a few steps of each cell on this rank; return what its last step held and sent."""
    if str(BENCHMARKS) not in sys.path:
        sys.path.insert(0, str(BENCHMARKS))
    from _bytes import measure_step

    return [(found.held, found.traffic) for found in (measure_step(**cell) for cell in cells)]
