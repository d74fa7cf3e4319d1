"""Histories with one fault each, and healthy ones without; seeded, as long as a short run."""

from __future__ import annotations

import math
import random
from typing import get_args

import pytest

from diptych.core.records import AlertKind, NodeSample, Over
from diptych.monitor.alerts import Alerts
from tests.launch.test_progress import record

KINDS = get_args(AlertKind)
SEEDS = range(5)
GIB = 1 << 30


class Clock:
    def __init__(self):
        self.now_s = 1000.0

    def __call__(self):
        return self.now_s


def healthy(step, draw, **fields):
    """A step of a run that learns: noise in everything, a little imbalance, a warm-up."""
    loss = 2.0 + 6.0 * math.exp(-step / 150)
    phases = {
        "data": Over(0.0, 0.004, 0.01 * draw.random(), draw.randrange(8)),
        "forward": Over(0.18, 0.2, 0.2 + 0.03 * draw.random(), draw.randrange(8)),
        "backward": Over(0.36, 0.4, 0.4 + 0.06 * draw.random(), draw.randrange(8)),
        "communication": Over(0.03 + 0.02 * draw.random(), 0.08, 0.15, draw.randrange(8)),
        "update": Over(0.02, 0.021, 0.022, draw.randrange(8)),
    }
    warm = 1.0 - 0.5 * math.exp(-step / 30)
    memory = {
        "allocated": Over(1.0, 1.0, (30 + 6 * draw.random()) * warm * GIB, draw.randrange(8)),
        "host": Over(1.0, 1.0, (8 + 0.3 * draw.random()) * warm * GIB, draw.randrange(8)),
    }
    step_s = 0.7 * draw.lognormvariate(0, 0.08)
    return record(
        step,
        **{
            "loss": loss * draw.lognormvariate(0, 0.08),
            "step_s": step_s,
            "tokens_per_s": 40_000 * draw.lognormvariate(0, 0.15),
            "phases_s": phases,
            "memory_bytes": memory,
            **fields,
        },
    )


def node(number, draw, *, time_s, **fields):
    return NodeSample(
        **{
            "time_s": time_s,
            "node": f"gpu-{number}",
            "attempt": 0,
            "memory_available_bytes": int((200 + 40 * draw.random()) * GIB),
            "memory_total_bytes": 512 * GIB,
            "ranks_memory_bytes": int((80 + 4 * draw.random()) * GIB),
            **fields,
        }
    )


def follow(records, *, seed=0, kinds=KINDS, per_node=None, **options):
    """Give alerts a history; returns them. A held-out loss takes longer every 100 steps."""
    draw, clock = random.Random(seed + 1000), Clock()
    alerts = Alerts(kinds, attempt=2, clock=clock, wall=lambda: 5.0, slow_every=(100,), **options)
    given = []
    for made in records:
        clock.now_s += made.step_s + (20.0 if made.step % 100 == 0 else 0.0)
        given += alerts.check() + alerts.note(made)
        if made.step % 3 == 0:
            fields = per_node(made.step) if per_node else {}
            nodes = [node(each, draw, time_s=clock.now_s) for each in range(3)]
            nodes.append(node(3, draw, time_s=clock.now_s, **fields))
            given += alerts.note_samples(nodes)
        given += alerts.note_disk(
            free_bytes=900 * GIB, total_bytes=2000 * GIB, checkpoint_bytes=90 * GIB
        )
    return given


def history(seed, *, num_steps=1200, fault=lambda step: {}):
    draw = random.Random(seed)
    return [healthy(step, draw, **fault(step)) for step in range(1, num_steps + 1)]


def told(alerts):
    return [(alert.kind, alert.over) for alert in alerts]


@pytest.mark.parametrize("seed", SEEDS)
def test_healthy_noise_gives_no_alert(seed):
    assert follow(history(seed), seed=seed) == []


@pytest.mark.parametrize("seed", SEEDS)
def test_a_small_loss_with_much_noise_gives_no_alert(seed):
    draw = random.Random(seed)
    steps = [
        healthy(step, draw, loss=0.02 * draw.lognormvariate(0, 0.7)) for step in range(1, 1200)
    ]
    assert follow(steps, seed=seed) == []


def test_a_loss_that_is_not_finite_is_told_once_and_is_over_after_fifty_good_steps():
    def fault(step):
        if step in (200, 201, 205):
            return {"loss": None, "skipped": True, "num_skipped": step - 199}
        return {}

    first, over = follow(history(0, num_steps=300, fault=fault))
    assert (first.kind, first.step, first.attempt, first.over) == ("nan", 200, 2, False)
    assert first.text.startswith("the loss is not finite; 1 steps skipped so far. Lower the ")
    assert (over.kind, over.step, over.over, over.text) == ("nan", 255, True, first.text)


def test_the_search_for_a_loss_scale_is_no_alert_and_no_end_of_overflows_is():
    def searched(step):
        if step <= 8:
            return {"skipped": True, "loss_scale": 65536.0}
        return {"loss_scale": 256.0}

    assert follow(history(0, num_steps=200, fault=searched)) == []

    def endless(step):
        return {"skipped": step % 4 == 0, "loss_scale": 256.0}

    (alert,) = follow(history(0, num_steps=200, fault=endless))
    assert alert.kind == "nan"
    assert "of the last 44 steps overflowed in fp16 (loss scale 256)" in alert.text


@pytest.mark.parametrize("seed", SEEDS)
def test_a_loss_that_rises_is_diverging_and_over_when_it_is_back(seed):
    def fault(step):
        return {"loss": 4.0 + 0.1 * (step % 7)} if 800 <= step < 900 else {}

    first, over = follow(history(seed, fault=fault), seed=seed)
    assert told([first, over]) == [("divergence", False), ("divergence", True)]
    assert 820 <= first.step <= 850
    assert 900 <= over.step <= 930
    assert "and was as low as" in first.text


@pytest.mark.parametrize("seed", SEEDS)
def test_a_single_bad_batch_is_no_divergence(seed):
    def fault(step):
        return {"loss": 30.0} if step in (700, 701, 900) else {}

    assert follow(history(seed, fault=fault), seed=seed) == []


@pytest.mark.parametrize("seed", SEEDS)
def test_a_drop_of_throughput_is_told(seed):
    def fault(step):
        draw = random.Random(step)
        return {"tokens_per_s": 22_000 * draw.lognormvariate(0, 0.1)} if 600 <= step < 800 else {}

    first, over = follow(history(seed, fault=fault), seed=seed)
    assert told([first, over]) == [("throughput", False), ("throughput", True)]
    assert 620 <= first.step <= 660
    assert 800 <= over.step <= 840
    assert "% below the run's own" in first.text


@pytest.mark.parametrize("seed", SEEDS)
def test_a_slow_rank_is_named_with_its_node(seed):
    def fault(step):
        draw = random.Random(step)
        rank = 5 if draw.random() < 0.97 else 2
        slow = Over(0.36, 0.42, 0.55 + 0.02 * draw.random(), rank)
        return {"phases_s": {**steps[0].phases_s, "backward": slow}} if step >= 300 else {}

    steps = history(seed, num_steps=1)
    nodes = [f"gpu-{rank // 4}" for rank in range(8)]
    (alert,) = follow(history(seed, num_steps=600, fault=fault), seed=seed, nodes=nodes)
    assert alert.kind == "straggler"
    assert 335 <= alert.step <= 365
    assert alert.text.startswith("rank 5 on gpu-1 is the slowest in backward in ")


@pytest.mark.parametrize("seed", SEEDS)
def test_exposed_communication_is_told_and_waiting_for_others_is_not(seed):
    def fault(least):
        return lambda step: {
            "phases_s": {
                "forward": Over(0.2, 0.2, 0.21, step % 8),
                "backward": Over(0.4, 0.4, 0.41, step % 8),
                "communication": Over(least + 0.01 * (step % 3), 0.3, 0.5, step % 8),
            }
        }

    (alert,) = follow(history(seed, num_steps=200, fault=fault(0.25)), seed=seed)
    assert (alert.kind, alert.step) == ("communication", 50)
    assert alert.text.startswith("ranks wait 43% of their computing time for communication")
    assert follow(history(seed, num_steps=200, fault=fault(0.05)), seed=seed) == []


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("kind", "field", "per_step"),
    [("device_memory", "allocated", GIB / 50), ("host_memory", "host", GIB / 100)],
)
def test_memory_that_grows_without_end_is_told(seed, kind, field, per_step):
    draw = random.Random(seed)

    def fault(step):
        made = healthy(step, draw).memory_bytes
        grown = made[field]._replace(most=made[field].most + per_step * max(0, step - 300), rank=6)
        return {"memory_bytes": {**made, field: grown}}

    (alert,) = follow(history(seed, num_steps=1200, fault=fault), seed=seed)
    assert (alert.kind, alert.over) == (kind, False)
    assert "rank 6" in alert.text
    assert 400 <= alert.step <= 900


@pytest.mark.parametrize("seed", SEEDS)
def test_loaders_of_one_node_that_grow_are_told(seed):
    def per_node(step):
        return {"ranks_memory_bytes": int((80 + step / 40) * GIB)}

    (alert,) = follow(history(seed), seed=seed, per_node=per_node)
    assert alert.kind == "host_memory"
    assert "host memory of this run on gpu-3 grew from " in alert.text


def test_a_host_that_is_nearly_full_is_told_and_over_when_it_is_not():
    def per_node(step):
        free = 20 if 300 <= step < 400 else 100
        return {"memory_available_bytes": free * GIB}

    first, over = follow(history(0, num_steps=500), per_node=per_node)
    assert told([first, over]) == [("host_memory", False), ("host_memory", True)]
    assert (first.step, over.step) == (300, 402)
    assert first.text.startswith("20.0 GiB of 512.0 GiB memory are free on gpu-3")


@pytest.mark.parametrize(
    ("free", "checkpoint", "is_told"),
    [(99, None, True), (101, None, False), (150, 160, True), (170, 160, False)],
)
def test_a_disk_without_room_for_a_checkpoint_is_told(free, checkpoint, is_told):
    alerts = Alerts(KINDS, attempt=0)
    given = alerts.note_disk(
        free_bytes=free * GIB,
        total_bytes=2000 * GIB,
        checkpoint_bytes=None if checkpoint is None else checkpoint * GIB,
    )
    assert told(given) == ([("disk", False)] if is_told else [])
    if checkpoint and is_told:
        assert "150.0 GiB of 2000.0 GiB" not in given[0].text
        assert "one more checkpoint takes 160.0 GiB" in given[0].text
    # A little more than enough is no end of it: it would come and go.
    again = alerts.note_disk(
        free_bytes=int(165 * GIB), total_bytes=2000 * GIB, checkpoint_bytes=160 * GIB
    )
    assert again == []
    over = alerts.note_disk(
        free_bytes=400 * GIB, total_bytes=2000 * GIB, checkpoint_bytes=160 * GIB
    )
    assert told(over) == ([("disk", True)] if is_told else [])


def steps_and_clock(*, gap_s, num_steps=60, slow_every=()):
    clock = Clock()
    alerts = Alerts(KINDS, attempt=0, clock=clock, slow_every=slow_every)
    for step in range(1, num_steps + 1):
        clock.now_s += gap_s
        assert alerts.note(record(step)) == []
    return alerts, clock


def test_a_step_that_is_long_overdue_is_told_until_it_comes():
    alerts, clock = steps_and_clock(gap_s=10.0)
    clock.now_s += 299.0
    assert alerts.check() == []
    clock.now_s += 2.0
    (stall,) = alerts.check()
    assert stall.text.startswith("no step since step 60 for 5 min 01 s; a step takes 10.0 s. See")
    clock.now_s += 600.0
    assert alerts.check() == []
    (over,) = alerts.note(record(61))
    assert (over.kind, over.over) == ("stall", True)


def test_short_steps_may_wait_two_minutes_and_longer_where_more_is_due():
    alerts, clock = steps_and_clock(gap_s=0.01)
    clock.now_s += 119.0
    assert alerts.check() == []
    clock.now_s += 2.0
    assert told(alerts.check()) == [("stall", False)]
    # Step 62 ends with a held-out loss or a checkpoint.
    alerts, clock = steps_and_clock(gap_s=0.01, slow_every=(62, 0))
    clock.now_s += 899.0
    assert alerts.check() == []
    clock.now_s += 2.0
    assert told(alerts.check()) == [("stall", False)]


def test_a_trace_may_be_written_for_a_quarter_of_an_hour():
    alerts, clock = steps_and_clock(gap_s=0.01)
    clock.now_s += 60.0
    assert told(alerts.note(record(61, profiled=True))) == []
    clock.now_s += 899.0
    assert alerts.check() == []
    clock.now_s += 2.0
    assert told(alerts.check()) == [("stall", False)]
    alerts.note(record(62, profiled=True))
    alerts.note(record(63))
    # What the profile took is no measure of what a step may take.
    clock.now_s += 121.0
    assert told(alerts.check()) == [("stall", False)]


@pytest.mark.parametrize("seed", SEEDS)
def test_profiled_steps_are_no_slowdown_no_straggler_and_no_leak(seed):
    def fault(profiled):
        def of(step):
            if not 300 <= step % 500 < 400:
                return {}
            grown = Over(1.0, 1.0, (50 + (step % 500 - 300) * 0.2) * GIB, 3)
            return {
                "profiled": profiled,
                "tokens_per_s": 9_000.0,
                "step_s": 3.0,
                "memory_bytes": {"host": grown, "allocated": grown},
                "phases_s": {
                    "forward": Over(0.2, 0.2, 0.21, 3),
                    "backward": Over(0.4, 0.4, 1.5, 3),
                    "communication": Over(0.5, 0.9, 1.5, step % 8),
                },
            }

        return of

    assert follow(history(seed, fault=fault(True)), seed=seed) == []
    kinds = {kind for kind, _ in told(follow(history(seed, fault=fault(False)), seed=seed))}
    assert {"throughput", "straggler", "communication"} <= kinds


def test_a_run_that_never_makes_a_step_is_told():
    clock = Clock()
    alerts = Alerts(KINDS, attempt=0, clock=clock)
    clock.now_s += 899.0
    assert alerts.check() == []
    clock.now_s += 2.0
    (stall,) = alerts.check()
    assert stall.text.startswith("no step yet for 15 min 01 s. See what ranks print")


def test_kinds_that_are_not_asked_for_are_not_given():
    def fault(step):
        return {"loss": None, "skipped": True, "num_skipped": 1} if step == 20 else {}

    assert follow(history(0, num_steps=30, fault=fault), kinds=("stall",)) == []
