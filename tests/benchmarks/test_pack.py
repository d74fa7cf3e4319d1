"""The arithmetic of the benchmarks `pack` and `schedule`, by hand and on a small index."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def pack(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import pack

    return pack


@pytest.fixture
def schedule(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import schedule

    return schedule


def test_waste_and_idle_by_hand(pack: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack, "RANKS", (2,))
    lengths = pack.Lengths(
        sources=np.array(["a"] * 4),
        num_tokens=np.array([10, 20, 30, 20]),
        num_tiles=np.array([1, 1, 1, 1]),
    )
    rows = [np.array([0]), np.array([2]), np.array([1]), np.array([3])]
    # Costs: means are 20 tokens, 450 squared tokens, 1 tile.
    cost = [0.5 * n / 20 + 0.25 * n * n / 450 + 0.25 for n in (10, 30)]
    figures = pack.judge(rows, lengths=lengths, width=40, cpu_s=2.0)
    assert figures["waste"] == 1 - 80 / 160
    assert figures["idle_2"] == pytest.approx(1 - sum(cost) / 2 / cost[1]), "one whole step"
    assert figures["samples_per_cpu_s"] == 2
    monkeypatch.setattr(pack, "RANKS", (1,))
    padded = pack.judge([np.array([0, 1]), np.array([2, 3])], lengths=lengths, width=0, cpu_s=1.0)
    assert padded["waste"] == 1 - 80 / (2 * 20 + 2 * 30)


def test_peers_take_every_sample(pack: ModuleType) -> None:
    num_tokens = np.random.default_rng(0).integers(1, 8_000, 101)
    for name in ("random_4", "next_fit", "best_fit"):
        rows = pack.peers()[name](num_tokens)
        assert sorted(np.concatenate(rows).tolist()) == list(range(101)), name
        if name != "random_4":
            assert max(num_tokens[row].sum() for row in rows) <= pack.MAX_TOKENS


@pytest.mark.parametrize("case", ["first", "resume", "epoch"])
@pytest.mark.parametrize("mode", ["bucket", "pack"])
def test_a_small_index_is_scheduled(
    schedule: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    mode: str,
    case: str,
) -> None:
    monkeypatch.setattr(schedule, "NUM_SHARDS", 3)
    monkeypatch.setattr(schedule, "SAMPLES_PER_SHARD", 200)
    monkeypatch.setitem(schedule.SPEC, "global_batch", 32)
    schedule.write_index(tmp_path)
    schedule.main(str(tmp_path), mode, case)
    found = json.loads(capsys.readouterr().out)
    assert found["peak_bytes"] > 0
    if case == "epoch":
        assert found["num_steps"] == 19 if mode == "bucket" else found["num_steps"] < 19
