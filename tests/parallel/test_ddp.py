"""DDP's options are those of the layout; what departs from plain averaging does what it says."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from diptych.core.records import DdpOptions, Layout, MixedPrecision
from tests.conftest import TINY_MODEL, TINY_SCHEDULE
from tests.parallel.small import spread_toy, toy_step
from tests.runs import make_spec, trajectory

WIDTH = 64
NUM_BYTES = WIDTH * WIDTH * 4


def ddp(num_ranks=2, **options):
    reduce = options.pop("reduce", "fp32")
    return Layout(
        engine="ddp",
        dp=num_ranks,
        ddp=DdpOptions(**options),
        mixed_precision=MixedPrecision(reduce=reduce),
    )


def count_bytes(layout, num_steps, restored=None):
    """Return what this rank hands to all-reduce in each step of one square matrix."""
    sent = []
    all_reduce = dist.all_reduce

    def counted(tensor, *args, **kwargs):
        sent[-1] += tensor.nbytes
        return all_reduce(tensor, *args, **kwargs)

    torch.manual_seed(0)
    engine = spread_toy(nn.Linear(WIDTH, WIDTH, bias=False), layout=layout)
    if restored:
        engine.restore({"replicas": {"step": restored}})
    dist.all_reduce = counted
    try:
        for number in range(num_steps):
            sent.append(0)
            torch.manual_seed(10 * number + dist.get_rank())
            toy_step(engine, torch.randn(3, WIDTH).square())
    finally:
        dist.all_reduce = all_reduce
    return sent


@pytest.mark.parametrize(
    "options", [{"compression": "bf16"}, {"compression": "fp16"}, {"reduce": "bf16"}]
)
def test_a_16_bit_hook_sends_half_the_bytes(ranks, options):
    assert ranks(2).run(count_bytes, layout=ddp(**options), num_steps=2)[0] == [NUM_BYTES // 2] * 2


def test_powersgd_sends_factors_after_its_whole_steps(ranks):
    layout = ddp(compression="powersgd", powersgd_rank=3, powersgd_start_step=4)
    factors = 3 * (WIDTH + WIDTH) * 4
    found = ranks(2).run(count_bytes, layout=layout, num_steps=6)[0]
    assert found == [NUM_BYTES] * 4 + [factors] * 2
    # A process that resumes needs two whole steps again: DDP arranges its buckets in the first.
    resumed = ranks(2).run(count_bytes, layout=layout, num_steps=4, restored=50)[0]
    assert resumed == [NUM_BYTES] * 2 + [factors] * 2


def train_powersgd(num_steps, broken):
    """One matrix; in step `broken` one rank's gradient is not a number."""
    torch.manual_seed(0)
    layout = ddp(compression="powersgd", powersgd_start_step=2)
    engine = spread_toy(nn.Linear(WIDTH, WIDTH, bias=False), layout=layout)
    applied = []
    for number in range(num_steps):
        inputs = torch.ones(1, WIDTH)
        if number == broken and dist.get_rank() == 1:
            inputs[0, 0] = float("nan")
        applied.append(toy_step(engine, inputs).applied)
    (weights,) = engine.model.parameters()
    return applied, weights.detach().numpy()


def test_powersgd_forgets_what_a_broken_gradient_left(ranks):
    (applied, first), (_, second) = ranks(2).run(train_powersgd, num_steps=6, broken=3)
    assert applied == [True, True, True, False, True, True]
    np.testing.assert_array_equal(first, second)
    assert np.isfinite(first).all()


LEARNING_RATE = 0.05
START, PERIOD, NUM_STEPS = 2, 3, 9


def make_slope(number, rank):
    """Return the gradient of a linear loss: another one in each step on each rank."""
    return np.random.default_rng((number, rank)).normal(size=4).astype(np.float32)


def train_locally(restored=0, broken=None):
    """Train a vector whose loss is linear; return weights after each step and the updates."""
    layout = ddp(local_sgd_period=PERIOD, local_sgd_start_step=START)
    module = nn.Linear(4, 1, bias=False)
    nn.init.zeros_(module.weight)
    engine = spread_toy(module, layout=layout)
    if restored:
        engine.restore({"replicas": {"step": restored}})
    weights, updates = [], []
    for number in range(restored, NUM_STEPS):
        slope = torch.from_numpy(make_slope(number, dist.get_rank()))[None]
        if number == broken and dist.get_rank() == 1:
            slope *= float("inf")
        updates.append(toy_step(engine, slope, lr=LEARNING_RATE))
        weights.append(module.weight.detach().numpy()[0].copy())
    settled = engine.tensors()["model.weight"].numpy()[0].copy()
    return np.array(weights), updates, settled, engine.state()


def train_by_hand(first=0, broken=None):
    """Post-local SGD of two workers, by its definition (Lin et al., Don't Use Large Mini-Batches).

    A worker's loss is its share of the mean: slopes are halved, then summed or kept.
    """
    weights = np.zeros((2, 4))
    course = []
    for number in range(first, NUM_STEPS):
        slopes = np.stack([make_slope(number, rank) for rank in range(2)])
        if number < START:
            slopes[:] = slopes.mean(axis=0)
        if number != broken:
            weights -= LEARNING_RATE * slopes
        num_local = number + 1 - START
        if num_local > 0 and num_local % PERIOD == 0:
            weights[:] = weights.mean(axis=0)
        course.append(weights.copy())
    return np.stack(course, axis=1)


@pytest.mark.parametrize("broken", [None, 4])
def test_local_sgd_averages_weights_every_period(ranks, broken):
    found = ranks(2).run(train_locally, broken=broken)
    expected = train_by_hand(broken=broken)
    for rank, (weights, updates, settled, state) in enumerate(found):
        np.testing.assert_allclose(weights, expected[rank], rtol=1e-5, atol=1e-7)
        assert [update.applied for update in updates] == [n != broken for n in range(NUM_STEPS)]
        # What a checkpoint holds is the mean of the ranks' weights.
        np.testing.assert_allclose(settled, expected[:, -1].mean(axis=0), rtol=1e-5, atol=1e-7)
        assert state == {"replicas": {"step": NUM_STEPS}}
    assert not np.allclose(expected[0, -1], expected[1, -1])


def test_local_sgd_reports_one_gradient_norm(ranks):
    (_, first, *_), (_, second, *_) = ranks(2).run(train_locally)
    norms = [update.grad_norm for update in first]
    assert norms == [update.grad_norm for update in second]
    slopes = [np.linalg.norm(make_slope(NUM_STEPS - 1, rank)) for rank in range(2)]
    assert norms[-1] == pytest.approx(np.sqrt(np.mean(np.square(slopes))), rel=1e-5)


def test_local_sgd_goes_on_where_it_was(ranks):
    found = ranks(2).run(train_locally, restored=5)
    expected = train_by_hand(first=5)
    for rank, (weights, *_) in enumerate(found):
        np.testing.assert_allclose(weights, expected[rank], rtol=1e-5, atol=1e-7)


class Buffered(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(256, 256)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, inputs):
        return self.linear(inputs)


def look_at_options(layout):
    """Return what DDP was told, and a buffer that the ranks set to their number."""
    module = Buffered()
    engine = spread_toy(module, layout=layout)
    for _ in range(2):
        module.count.fill_(dist.get_rank())
        toy_step(engine, torch.ones(1, 256))
    names = ("gradient_as_bucket_view", "static_graph", "find_unused_parameters")
    told = {name: getattr(engine.module, name) for name in names}
    return {**told, "bytes": engine.module.bucket_bytes_cap, "buffer": float(module.count)}


def test_options_reach_ddp(ranks):
    plain = {
        "gradient_as_bucket_view": True,
        "static_graph": False,
        "find_unused_parameters": False,
        "bytes": 25 * 1024**2,
        "buffer": 1.0,
    }
    assert ranks(2).run(look_at_options, layout=ddp())[1] == plain
    layout = ddp(
        bucket_bytes=1024,
        gradient_as_bucket_view=False,
        static_graph=True,
        broadcast_buffers=True,
    )
    assert ranks(2).run(look_at_options, layout=layout)[1] == {
        "gradient_as_bucket_view": False,
        "static_graph": True,
        "find_unused_parameters": False,
        "bytes": 1024,
        "buffer": 0.0,
    }
    layout = ddp(find_unused_parameters=True)
    assert ranks(2).run(look_at_options, layout=layout)[1]["find_unused_parameters"]


def count_buckets(layout):
    """Return how many messages a step of a weight of 256 KiB and a bias of 1 KiB takes."""
    sent = []
    engine = spread_toy(Buffered(), layout=layout)
    all_reduce = dist.all_reduce

    def counted(tensor, *args, **kwargs):
        sent.append(tensor.nbytes)
        return all_reduce(tensor, *args, **kwargs)

    toy_step(engine, torch.ones(1, 256))
    dist.all_reduce = counted
    try:
        toy_step(engine, torch.ones(1, 256))
    finally:
        dist.all_reduce = all_reduce
    return sent


def test_a_bucket_is_one_message(ranks):
    layout = ddp(compression="bf16")
    assert ranks(2).run(count_buckets, layout=layout)[0] == [(256 * 256 + 256) * 2]
    layout = ddp(compression="bf16", bucket_bytes=1024)
    assert sorted(ranks(2).run(count_buckets, layout=layout)[0]) == [256 * 2, 256 * 256 * 2]


@pytest.mark.parametrize(
    "options",
    [
        {"compression": "powersgd", "powersgd_start_step": 2, "powersgd_rank": 2},
        {"local_sgd_period": 4, "local_sgd_start_step": 2},
    ],
    ids=["powersgd", "local sgd"],
)
def test_what_departs_from_averaging_still_trains(ranks, corpus, options):
    layout = ddp(**options).model_copy(update={"micro_batch": 2})
    assert layout.departures
    spec = make_spec(corpus, layout=layout, model=TINY_MODEL, schedule=TINY_SCHEDULE)
    losses = ranks(2).run(trajectory, spec=spec, num_steps=20)[0]["losses"]
    assert losses[-1] < 0.92 * losses[0]
