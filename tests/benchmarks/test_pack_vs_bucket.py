"""The benchmark `pack_vs_bucket`: its arithmetic by hand, and turns that end where it says."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import pack_vs_bucket

    return pack_vs_bucket


def _found(bench: ModuleType, loss: float, tokens: list[int], cpu_s: list[float]):
    return bench.Found(loss, turn_cpu_s=cpu_s, turn_s=[2.0] * len(tokens), turn_label_tokens=tokens)


def test_figures_by_hand(bench: ModuleType) -> None:
    ours = [_found(bench, loss, [90, 120], [1.0, 1.0]) for loss in (1.0, 1.2)]
    peer = [_found(bench, loss, [60, 60], [1.0, 1.0]) for loss in (1.1, 1.3)]
    found = bench.judge({"bucket": peer, "pack": ours})
    assert found.ratio == pytest.approx((1.5 + 2.0) / 2)
    assert (found.ours, found.peers) == (105, {"bucket": 60})
    assert found.raw["difference"] == pytest.approx(-0.1)
    # Each mean of two has a variance of 0.02 / 2.
    assert found.raw["standard_error"] == pytest.approx(0.02**0.5)
    assert found.met
    worse = [_found(bench, loss, [90, 120], [1.0, 1.0]) for loss in (1.6, 1.8)]
    assert not bench.judge({"bucket": peer, "pack": worse}).met
    slow = [_found(bench, loss, [66, 66], [1.0, 1.0]) for loss in (1.0, 1.2)]
    assert not bench.judge({"bucket": peer, "pack": slow}).met


def test_label_tokens_belong_to_the_turn_that_computed_them(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop that computes step k after it was asked for the k-th time, counted from 0."""
    monkeypatch.setattr(bench, "STEPS_PER_TURN", 2)
    computed: list[list[int]] = [[]]
    turns = SimpleNamespace(yield_turn=lambda name: computed.append([]))
    taker = bench._TurnTaker("one", turns=turns)
    taker.begin()
    assert not taker()
    for step in range(1, 8):
        assert not taker()
        computed[-1].append(step)
    taker.end()
    records = [
        SimpleNamespace(
            step=step,
            num_label_tokens=10**step,
            num_samples=4,
            padding_fraction=0.5,
            heldout_loss=0.25 if step == 7 else None,
        )
        for step in range(1, 8)
    ]
    found = bench.read_run(records, taker.turns)
    assert len(taker.turns) == len(computed) == 4
    assert found.turn_label_tokens == [sum(10**step for step in turn) for turn in computed[1:-1]]
    assert (found.heldout_loss, len(found.turn_cpu_s)) == (0.25, 2)
    assert found.means == {"samples": 4.0, "padding": 0.5}
