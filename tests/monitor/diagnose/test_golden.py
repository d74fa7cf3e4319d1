"""Two cases that a person has worked out by hand, from records written for them."""

from __future__ import annotations

import pytest

from diptych.core.records import DeviceSample
from diptych.monitor.diagnose.compare import compare
from diptych.monitor.diagnose.diagnose import diagnose
from diptych.monitor.diagnose.settings import Settings
from diptych.monitor.diagnose.signals import measure

from .records import sample, step

GIB = 1 << 30


def _swinging():
    """100 steps of a rank: 0.78 s of computing, 0.22 s waiting; a checkpoint of 1 s every tenth.

    So 100 steps take 100 s and 10 checkpoints 10 s: data 22 of 110 s, checkpoints 10 of 110 s.
    """
    records, samples, now_s = [], [], 1000.0
    for number in range(1, 101):
        phases = {"data": (0.22,), "forward": (0.26,), "backward": (0.47,), "update": (0.05,)}
        now_s += 1.0
        if number % 10 == 0:
            phases["checkpoint"] = (1.0,)
        records.append(step(number, phases, time_s=now_s))
        # Between 70% and 90% busy, in turn; much less beside a checkpoint.
        busy = 0.3 if number % 10 == 0 else (0.7, 0.9)[number % 2]
        device = DeviceSample(
            index=0,
            busy_fraction=busy,
            memory_used_bytes=48 * GIB,
            memory_total_bytes=80 * GIB,
            clock_hz=1.9e9,
            max_clock_hz=1.98e9,
        )
        samples.append(
            sample(
                now_s - 0.5,
                device,
                num_cores=16,
                cpu_fraction=0.5,
                loaders_cpu_cores=4.0,
                num_loaders=4,
            )
        )
        now_s += 1.0 if number % 10 == 0 else 0.0
    return records, samples


def test_swinging_utilisation_is_decoding_first_and_checkpoints_second():
    records, samples = _swinging()
    settings = Settings(num_workers=4, device="cuda", checkpoint_every_steps=10)
    found = diagnose(
        records, run_id="r", samples=samples, settings=settings, steps=(1, 100)
    ).findings
    assert [each.bound for each in found] == ["decode_cpu", "checkpoint"]
    decode, checkpoint = found
    assert decode.cost == pytest.approx(22 / 110, abs=1e-3)
    assert checkpoint.cost == pytest.approx(10 / 110, abs=1e-3)
    assert checkpoint.steps == tuple((each, each) for each in range(10, 101, 10))
    told = " ".join(decode.evidence)
    assert "4 loaders keep 4.0 cores busy (100% of a core each)" in told
    assert "devices are between 70% and 90% busy" in told
    assert "every 10th step is slow, by 1 s, 10 times in 100 steps" in checkpoint.evidence
    # Half of the 16 cores are free, so more loaders are the first thing to try.
    first = decode.changes[0]
    assert (first.setting, first.to, first.gain) == ("train.num_workers", "8", decode.cost)


def test_memory_at_60_percent_is_no_finding():
    records, samples = _swinging()
    found = diagnose(records, run_id="r", samples=samples, settings=Settings()).findings
    assert not {"memory", "fragmentation"} & {each.bound for each in found}


def test_the_missing_speedup_is_split():
    """5.2 times as fast on 8 ranks, of 8.

    One rank takes 8 s a step: data 0.16, forward 2.4, backward 4.8, update 0.64. An eighth of that
    is 1 s, and 5.2 times as fast is 8 / 5.2 s = 1.538461 s, so 0.538461 s are lost, and each second
    lost is 8 / 1.538461 = 5.2 of the speedup: together 2.8.

    What the eight ranks do: seven compute 0.9 s (0.3 + 0.6), the last one 1.06 s (0.36 + 0.7): mean
    0.92 s, the expected 0.9 s and 0.02 s above. The seven wait 0.16 s for it, on average 0.14 s.
    Rows are uneven by 5% (idle_fraction): of the last one's 1.06 s that is 0.053 s; the other
    0.087 s are straggling. The exchange itself takes 0.25 s. Every rank waits 0.068461 s for data,
    of which 0.02 s are expected, and updates in 0.16 s, 0.08 s of which are expected.
    Sum: 0.02 + 0.053 + 0.087 + 0.25 + 0.048461 + 0.08 = 0.538461.
    """
    one = {"data": (0.16,), "forward": (2.4,), "backward": (4.8,), "update": (0.64,)}
    eight = {
        "data": (0.0684615,) * 8,
        "forward": (0.3,) * 7 + (0.36,),
        "backward": (0.6,) * 7 + (0.7,),
        "communication": (0.41,) * 7 + (0.25,),
        "update": (0.16,) * 8,
    }
    found = compare(
        measure([step(number, eight, idle_fraction=0.05) for number in range(1, 41)]),
        against=measure([step(number, one) for number in range(1, 41)]),
        run_ids=("eight", "one"),
        num_ranks=(8, 1),
    )
    assert found.speedup == pytest.approx(5.2, abs=1e-4)
    assert found.ideal == 8
    missing = {part.name: part.missing for part in found.parts}
    assert sum(missing.values()) == pytest.approx(2.8, abs=1e-4)
    assert missing["communication"] == pytest.approx(0.25 * 5.2, abs=1e-3)
    assert missing["straggling"] == pytest.approx(0.087 * 5.2, abs=1e-3)
    assert missing["imbalance"] == pytest.approx(0.053 * 5.2, abs=1e-3)
    assert missing["data"] == pytest.approx(0.0484615 * 5.2, abs=1e-3)
    assert missing["update"] == pytest.approx(0.08 * 5.2, abs=1e-3)
    assert missing["computing"] == pytest.approx(0.02 * 5.2, abs=1e-3)
    assert [part.name for part in found.parts][:2] == ["communication", "straggling"]
    assert found.verdict == (
        "5.2 times as fast, of 8 that its ranks promise: "
        "communication -1.3, straggling -0.45, update -0.42, imbalance -0.28"
    )
