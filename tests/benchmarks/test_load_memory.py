"""The memory of loading is private memory, and not what is mapped."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MB = 1_000_000


@pytest.fixture
def load_memory(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import load_memory

    return load_memory


def test_what_is_freed_again_counts_and_what_is_mapped_does_not(load_memory, tmp_path):
    path = tmp_path / "mapped"
    path.write_bytes(bytes(200 * MB))
    with load_memory._peak() as peak:
        mapped = np.memmap(path, mode="r", dtype=np.uint8)
        assert mapped.sum() == 0
        for _ in range(3):
            np.ones(64 * MB // 8)
    assert 60 <= peak.peak_mb <= 80
