"""The benchmark `recompute`: what lives is counted right, and a small model goes through."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def recompute(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import recompute

    return recompute


def test_what_lives_by_hand(recompute: ModuleType) -> None:
    before = torch.zeros(1000)
    with recompute.LiveBytes() as live:
        one = before + 1
        view = one.view(10, 100)
        before.add_(1)
        assert live.now == 4000, "a view and a change in place are no storage of their own"
        del one
        assert live.now == 4000, "the view holds it"
        two = view.exp()
        del view
        assert (live.now, live.peak) == (4000, 8000)
        live.leave_out(two)
        assert live.now == 0
        del two
        assert live.now == 0
        weight = torch.ones(1000, requires_grad=True)
        # Autograd keeps the results of exp and tanh, and nobody else does.
        loss = weight.exp().tanh().sum()
        assert live.now == 3 * 4000 + 4
        loss.backward()
        del loss
        assert live.now == 2 * 4000, "the weight and its gradient"


def test_figures_by_hand(recompute: ModuleType) -> None:
    times = {"none": [2.0, 4.0, 1.0], "blocks": [2.6, 6.0, 1.2]}
    peaks = {"none": 10_000_000, "blocks": 3_000_000}
    measured = recompute.judge(peaks, times=times, head={})
    assert (measured.ours, measured.peers, measured.ratio) == (3.0, {"none": 10.0}, 0.3)
    assert measured.raw["time_to_none"]["blocks"] == pytest.approx(1.3)
    assert measured.met
    assert not recompute.judge({**peaks, "blocks": 5_000_000}, times=times, head={}).met
    slow = {**times, "blocks": [2.8, 5.6, 1.4]}
    assert not recompute.judge(peaks, times=slow, head={}).met


def test_a_small_model_goes_through(recompute: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    text = {**recompute.SIZES["text"], "num_hidden_layers": 3, "hidden_size": 64}
    vision = {**recompute.SIZES["vision"], "depth": 3, "hidden_size": 64}
    monkeypatch.setitem(recompute.SIZES, "text", text)
    monkeypatch.setitem(recompute.SIZES, "vision", vision)
    monkeypatch.setattr(recompute, "NUM_ROUNDS", 1)
    monkeypatch.setattr(recompute, "NUM_WARMUPS", 0)
    for name, value in {"HEAD_WORDS": 512, "HEAD_LABELS": 256, "HEAD_CHUNK": 32}.items():
        monkeypatch.setattr(recompute, name, value)
    threads = torch.get_num_threads()
    try:
        measured = recompute.measure(None)
    finally:
        torch.set_num_threads(threads)
    peaks = measured.raw["peak_to_none"]
    assert peaks["blocks"] < peaks["every second"] < 1
    assert peaks["operators"] < 1
    assert peaks["offload"] < 0.5
    assert measured.raw["head"]["peak_to_whole"] < 0.5
    assert set(measured.raw["time_to_none"]) == set(recompute.VARIANTS)
