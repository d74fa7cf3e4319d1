"""The arithmetic of the benchmarks `comm_bytes` and `state_bytes`; ranks are not started."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from diptych.core.records import HeldBytes

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def comm_bytes(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import comm_bytes

    return comm_bytes


@pytest.fixture
def state_bytes(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import state_bytes

    return state_bytes


def found(cell: str, *ranks: Any, name: str | None = None) -> Any:
    return SimpleNamespace(cell=cell, name=name or cell, ranks=list(ranks))


def sent(num_bytes: float) -> Any:
    return SimpleNamespace(sent_bytes=num_bytes, by_kind={})


def held(*numbers: int) -> Any:
    kinds = ("parameters", "gradients", "optimizer")
    return SimpleNamespace(held=HeldBytes(**dict(zip(kinds, numbers, strict=True))))


def test_the_rank_that_is_off_most_counts(comm_bytes: ModuleType) -> None:
    cells = [found("a", sent(100), sent(98)), found("a", sent(100.5), name="torch's a")]
    measured = comm_bytes.compare(cells, predicted={"a": 100.0})
    assert measured.peers == {"a": 0.98, "torch's a": 1.005}
    assert measured.ratio == pytest.approx(0.02)
    assert not measured.met
    assert comm_bytes.compare(cells[1:], predicted={"a": 100.0}).met


def test_held_bytes_have_to_be_equal(state_bytes: ModuleType) -> None:
    wanted = {"a": [held(4, 4, 8).held, held(4, 4, 8).held]}
    equal = state_bytes.compare([found("a", held(4, 4, 8), held(4, 4, 8))], predicted=wanted)
    assert (equal.peers, equal.ratio, equal.met) == ({"a": 1.0}, 0.0, True)
    # The sum is the same, and yet two numbers differ.
    moved = state_bytes.compare([found("a", held(4, 4, 8), held(5, 4, 7))], predicted=wanted)
    assert (moved.peers, moved.ratio, moved.met) == ({"a": 1.0}, 0.25, False)


def test_every_layout_can_run(comm_bytes: ModuleType) -> None:
    import _bytes

    assert {cell.layout.world_size for cell in _bytes.CELLS} == {2, 3, 4}
    names = [cell.name for cell in _bytes.CELLS]
    assert len(set(names)) == len(names)
    assert {cell.layout.engine for cell in _bytes.CELLS if cell.plain} == {"ddp", "fsdp2"}
