"""fp16's loss scale moves as torch's does; a step that overflows is skipped by every rank."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from diptych.core.records import Layout, LossScale, MixedPrecision
from diptych.parallel.loss_scale import LossScaler
from tests.parallel.small import spread_model, spread_toy, step, toy_step, whole_weights


def course_of_torch(finite, options):
    """Return torch.amp's scales after each of these steps."""
    scaler = torch.amp.GradScaler(
        "cpu",
        init_scale=options.initial,
        growth_factor=options.growth,
        backoff_factor=options.backoff,
        growth_interval=options.growth_interval,
    )
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scaler.scale(torch.ones(1))
    scales = []
    for is_finite in finite:
        parameter.grad = torch.full((1,), 1.0 if is_finite else float("inf"))
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


@settings(deadline=None, max_examples=50)
@given(
    finite=st.lists(st.booleans(), min_size=1, max_size=40),
    interval=st.integers(1, 5),
    initial=st.sampled_from([1.0, 1024.0, 65536.0, 2.0**126]),
    factors=st.sampled_from([(2.0, 0.5), (4.0, 0.25), (1.5, 0.5)]),
)
@example(finite=[True] * 4, interval=1, initial=2.0**126, factors=(2.0, 0.5))
def test_the_scale_moves_as_torchs(finite, interval, initial, factors):
    growth, backoff = factors
    options = LossScale(
        initial=initial, minimum=1e-30, growth_interval=interval, growth=growth, backoff=backoff
    )
    scaler = LossScaler(options)
    scales = []
    for is_finite in finite:
        scaler.observe(is_finite)
        scales.append(scaler.scale)
    assert scales == pytest.approx(course_of_torch(finite, options), rel=1e-6)


def test_the_scale_stops_at_its_minimum_and_says_so():
    scaler = LossScaler(LossScale(initial=8.0, minimum=2.0))
    assert [scaler.observe(False) for _ in range(4)] == [True, True, False, False]
    assert scaler.scale == 2.0


def test_a_restored_scale_goes_on_as_the_first_would():
    options = LossScale(initial=16.0, growth_interval=3)
    first, second = LossScaler(options), LossScaler(options)
    for is_finite in (True, False, True, True):
        first.observe(is_finite)
    second.restore(json.loads(json.dumps(first.state())))
    for is_finite in (True, True, True, False):
        first.observe(is_finite)
        second.observe(is_finite)
        assert second.state() == first.state()


INITIAL = 2.0**14


def fp16(engine, **options):
    axes = {"dp": 2} if engine == "ddp" else {"shard": 2}
    scale = LossScale(**{"initial": INITIAL, **options})
    return Layout(
        engine=engine, **axes, precision="fp16", mixed_precision=MixedPrecision(loss_scale=scale)
    )


def overflow_first(layout):
    """Train a linear layer whose gradient is its input: 1 on one rank, 8 on the other.

    fp16 ends at 65504, so the second rank alone overflows at the scales 2^14 and 2^13.
    """
    module = nn.Linear(8, 2, bias=False)
    nn.init.ones_(module.weight)
    engine = spread_toy(module, layout=layout)
    found = []
    for _ in range(4):
        update = toy_step(engine, torch.full((1, 8), 8.0 if dist.get_rank() else 1.0))
        found.append((update, whole_weights(engine)[0]))
    return found, engine.state()


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_an_overflow_on_one_rank_is_skipped_by_all(ranks, engine):
    for found, state in ranks(2).run(overflow_first, layout=fp16(engine)):
        updates = [update for update, _ in found]
        assert [update.applied for update in updates] == [False, False, True, True]
        assert [update.can_shrink for update in updates] == [True, True, False, False]
        assert [update.loss_scale for update in updates] == [2.0**14, 2.0**13, 2.0**12, 2.0**12]
        assert not any(np.isfinite(update.grad_norm) for update in updates[:2])
        # The mean of 1 and 8, in each of 16 weights, and without the scale.
        assert updates[2].grad_norm == pytest.approx(4.5 * 4, rel=1e-6)
        expected = [1.0, 1.0, 1.0 - 0.1 * 4.5, 1.0 - 0.2 * 4.5]
        for (_, weights), value in zip(found, expected, strict=True):
            np.testing.assert_allclose(weights, value, rtol=1e-6)
        assert state == {"loss_scale": {"scale": 2.0**12, "num_finite": 2}}


def resume(layout, state):
    engine = spread_model(layout)
    engine.restore(state)
    return [step(engine).loss_scale for _ in range(4)], engine.state()


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_an_engine_goes_on_with_the_scale_of_a_checkpoint(ranks, engine):
    state = {"loss_scale": {"scale": 32.0, "num_finite": 1}}
    layout = fp16(engine, growth_interval=3)
    scales, after = ranks(2).run(resume, layout=layout, state=state)[0]
    assert scales == [32.0, 32.0, 64.0, 64.0]
    assert after == {"loss_scale": {"scale": 64.0, "num_finite": 2}}
