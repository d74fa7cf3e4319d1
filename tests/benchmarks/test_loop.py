"""The benchmarks' arithmetic and turn taking; the figures themselves are made by `make bench`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import loop

    return loop


def test_loops_take_turns(loop: ModuleType) -> None:
    done: list[str] = []
    turns = loop.Turns(["a", "b", "c"])

    def run(name: str, num_steps: int) -> None:
        for _ in range(num_steps):
            done.append(name)
            turns.yield_turn(name)

    turns.run({"a": lambda: run("a", 2), "b": lambda: run("b", 4), "c": lambda: run("c", 3)})
    assert done == ["a", "b", "c", "a", "b", "c", "b", "c", "b"]


def test_failing_loop_is_named_and_holds_up_nobody(loop: ModuleType) -> None:
    done: list[str] = []
    turns = loop.Turns(["a", "b"])

    def fail() -> None:
        raise ValueError("no such batch")

    with pytest.raises(RuntimeError, match="the loop 'a' failed") as failure:
        turns.run({"a": fail, "b": lambda: done.append("b")})
    assert isinstance(failure.value.__cause__, ValueError)
    assert done == ["b"]


def rounds_of(loop: ModuleType, **step_ms: float) -> dict[str, object]:
    """Give every loop a constant step; ours and the trainer's write checkpoints of 20 and 50 ms."""
    found = {}
    for name, value in step_ms.items():
        steps = np.full(loop.NUM_STEPS - 1, value / 1e3)
        extra = {"ours": 0.02, "trainer": 0.05}.get(name, 0.0)
        steps[loop.CHECKPOINT_EVERY - 1 :: loop.CHECKPOINT_EVERY] += extra
        losses = np.linspace(90, 60, loop.NUM_STEPS)
        found[name] = loop.Round(step_s=steps, cpu_s=steps / 2, losses=losses)
    return found


def test_figures_by_hand(loop: ModuleType) -> None:
    quiet = {"plain": 10.0, "ours": 10.2, "trainer": 13.0, "lightning": 12.0}
    quiet |= {"trainer defaults": 11.0, "plain again": 10.0}
    slow = {name: value + 5 for name, value in quiet.items()}
    measured = loop.judge([rounds_of(loop, **each) for each in (quiet, slow, quiet)])
    every = loop.steps_between(10.0)
    assert measured.ours == pytest.approx(10 + 0.2 + 20 / every)
    assert measured.peers["trainer"] == pytest.approx(10 + 3 + 50 / every)
    assert measured.ratio == pytest.approx((0.2 + 20 / every) / (3 + 50 / every))
    assert measured.met == (measured.ratio <= 0.1)
    wall = measured.raw["wall"]
    assert wall["ratio_to_trainer_defaults"] == pytest.approx(0.2 + 20 / every)
    assert wall["ratio_without_checkpoints"] == pytest.approx(0.2 / 3)
    assert measured.raw["cpu"]["added_ms"]["lightning"] == pytest.approx(1.0)
    assert measured.peers["plain again"] == pytest.approx(10.0)


def test_unequal_work_is_refused(loop: ModuleType) -> None:
    found = rounds_of(loop, plain=10.0, ours=10.0)
    loop.check_equal_work([found])
    found["ours"].losses[-1] *= 1.001
    with pytest.raises(AssertionError, match="a loss of ours differs"):
        loop.check_equal_work([found])


def test_line_has_what_scripts_read(
    loop: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    run = sys.modules["run"]
    monkeypatch.setattr(run, "FOLDER", tmp_path)
    measured = run.Measured(
        unit="ms",
        ours=1.0,
        peers={"plain": 0.5},
        ratio=0.25,
        goal="<= 0.1",
        met=False,
        raw={"a": 1},
    )
    run.report("loop", measured=measured)
    line = json.loads(capsys.readouterr().out)
    assert list(line) == ["name", "unit", "ours", "peers", "ratio", "goal", "met", "machine"]
    assert (line["peers"], line["ratio"], line["met"]) == ({"plain": 0.5}, 0.25, False)
    kept = json.loads((tmp_path / "results" / "loop.json").read_text())
    assert kept == {**line, "raw": {"a": 1}}


@pytest.mark.slow
def test_all_loops_train_alike(loop: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("accelerate")
    pytest.importorskip("lightning")
    monkeypatch.setattr(loop, "NUM_STEPS", 40)
    monkeypatch.setattr(loop, "CHECKPOINT_EVERY", 20)
    found = loop.run_round(loop.make_batches(), number=0)
    loop.check_equal_work([found])
    assert set(found) == set(loop.LOOPS)
