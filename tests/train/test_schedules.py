"""The rate's course, worked by hand and held against transformers' schedules."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import optimization

from diptych.core.records import OptimizerSpec, TowerRates
from diptych.train.schedules import learning_rate, lr_by_tower

NUM_STEPS, WARMUP = 40, 4
THEIRS = {
    "cosine": lambda made: optimization.get_cosine_with_min_lr_schedule_with_warmup(
        made, num_warmup_steps=WARMUP, num_training_steps=NUM_STEPS, min_lr_rate=0.1
    ),
    "linear": lambda made: optimization.get_linear_schedule_with_warmup(
        made, num_warmup_steps=WARMUP, num_training_steps=NUM_STEPS
    ),
    "constant": lambda made: optimization.get_constant_schedule_with_warmup(
        made, num_warmup_steps=WARMUP
    ),
    "wsd": lambda made: optimization.get_wsd_schedule(
        made,
        num_warmup_steps=WARMUP,
        num_decay_steps=10,
        num_training_steps=NUM_STEPS,
        decay_type="linear",
        min_lr_ratio=0.1,
    ),
}


def spec_of(name, **fields):
    decay_steps = 10 if name == "wsd" else None
    given = {"lr": 2.0, "warmup_steps": WARMUP, "final_lr_fraction": 0.1, **fields}
    return OptimizerSpec(lr_schedule=name, decay_steps=decay_steps, **given)


def rates_of(spec, *, num_steps=NUM_STEPS):
    return [learning_rate(step, spec=spec, num_steps=num_steps) for step in range(num_steps + 1)]


@pytest.mark.parametrize("name", THEIRS)
def test_after_the_warm_up_it_is_transformers(name):
    ours = rates_of(spec_of(name, final_lr_fraction=0.0 if name == "linear" else 0.1))
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(()))], lr=2.0)
    schedule = THEIRS[name](optimizer)
    theirs = []
    for _ in range(NUM_STEPS + 1):
        theirs.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert ours[WARMUP:] == pytest.approx(theirs[WARMUP:], rel=1e-12, abs=1e-12)


def test_the_warm_up_ends_at_the_whole_rate():
    for name in THEIRS:
        assert rates_of(spec_of(name))[:5] == [0.5, 1.0, 1.5, 2.0, 2.0]
    assert learning_rate(0, spec=spec_of("cosine", warmup_steps=0), num_steps=9) == 2.0


def test_a_cosine_by_hand():
    spec = OptimizerSpec(lr=1.0, warmup_steps=4, final_lr_fraction=0.1)
    rates = rates_of(spec, num_steps=104)
    assert rates[54] == pytest.approx(0.1 + 0.9 * 0.5)
    assert rates[29] == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4)))
    assert rates[104] == pytest.approx(0.1)


def test_a_line_by_hand():
    rates = rates_of(spec_of("linear"), num_steps=24)
    assert rates[14] == pytest.approx(2.0 * (0.1 + 0.9 / 2))
    assert rates[24] == pytest.approx(0.2)


def test_constant_never_falls():
    assert set(rates_of(spec_of("constant"))[WARMUP:]) == {2.0}


def test_wsd_falls_over_its_last_steps():
    rates = rates_of(spec_of("wsd"))
    assert set(rates[WARMUP:31]) == {2.0}
    assert rates[35] == pytest.approx(2.0 * (0.1 + 0.9 / 2))
    assert rates[40] == pytest.approx(0.2)


def test_towers_with_rates_of_their_own_follow_the_same_course():
    towers = {
        "vision": TowerRates(lr=0.5, layer_decay=0.9),
        "language": TowerRates(layer_decay=0.9),
    }
    spec = spec_of("cosine", towers=towers)
    assert lr_by_tower(1.0, spec=spec) == {"vision": 0.25}
    assert lr_by_tower(1.0, spec=spec_of("cosine")) == {}
