"""Muon beside AdamW: each updates its own, as torch's do alone, and both are in a checkpoint."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from diptych.core.errors import LayoutError
from diptych.core.records import Layout, OptimizerSpec
from diptych.parallel import storage, zero_runtime
from diptych.train.muon import MuonAndAdamW
from diptych.train.optimizers import build_optimizer
from tests.conftest import TINY_MODEL, TINY_SCHEDULE
from tests.runs import make_spec, trajectory

SPEC = OptimizerSpec(kind="muon", lr=0.01, momentum=0.9, weight_decay=0.1, betas=(0.8, 0.9))


def made(model, *, ema_decay=None):
    """The first layer's matrix by Muon, the rest by AdamW."""
    rest = [each for each in model.parameters() if each is not model[0].weight]
    shared = {} if ema_decay is None else {"ema_decay": ema_decay}
    return MuonAndAdamW(
        matrices=[{"params": [model[0].weight], "weight_decay": 0.1, **shared}],
        rest=[{"params": rest, "weight_decay": 0.0, **shared}],
        spec=SPEC,
    )


def model_of(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2))


def train(model, *, optimizers, num_steps=3, first=0):
    for number in range(first, first + num_steps):
        torch.manual_seed(100 + number)
        model(torch.randn(5, 6)).square().sum().backward()
        for each in optimizers:
            each.step()
            each.zero_grad()


def test_each_is_updated_as_torch_s_own_do_alone():
    ours, theirs = model_of(), model_of()
    train(ours, optimizers=[made(ours)])
    matrix = theirs[0].weight
    rest = [each for each in theirs.parameters() if each is not matrix]
    alone = [
        torch.optim.Muon(
            [matrix], lr=0.01, momentum=0.9, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(rest, lr=0.01, betas=(0.8, 0.9), eps=1e-8, weight_decay=0.0),
    ]
    train(theirs, optimizers=alone)
    assert torch.equal(ours[0].weight, theirs[0].weight)
    for found, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
    assert not torch.equal(ours[0].weight, model_of()[0].weight)


def test_a_first_step_of_muon_by_hand():
    """Of a matrix whose singular values are equal, all steps of Newton and Schulz keep the form."""
    model = nn.Sequential(nn.Linear(3, 3, bias=False))
    nn.init.eye_(model[0].weight)
    optimizer = MuonAndAdamW(
        matrices=[{"params": [model[0].weight], "weight_decay": 0.1}], rest=[], spec=SPEC
    )
    model[0].weight.grad = 7 * torch.eye(3)
    optimizer.step()
    value = 1 / 3**0.5
    for _ in range(5):
        value = 3.4445 * value - 4.7750 * value**3 + 2.0315 * value**5
    expected = (1 - 0.01 * 0.1) - 0.01 * 0.2 * 3**0.5 * value
    torch.testing.assert_close(model[0].weight.detach(), expected * torch.eye(3), rtol=0, atol=1e-4)


def test_a_checkpoint_has_the_moment_of_each_and_resumes_it_to_the_last_bit():
    through, resumed = model_of(), model_of(1)
    first = made(through, ema_decay=0.5)
    train(through, optimizers=[first])
    saved = {
        name: tensor.clone()
        for name, tensor in storage.tensors_of(through, optimizer=first).items()
    }
    assert {name for name in saved if name.startswith("optimizer.0.weight")} == {
        "optimizer.0.weight.momentum_buffer",
        "optimizer.0.weight.ema",
    }
    assert "optimizer.2.weight.exp_avg" in saved
    assert "optimizer.2.weight.momentum_buffer" not in saved
    second = made(resumed, ema_decay=0.5)
    for name, tensor in storage.tensors_of(resumed, optimizer=second).items():
        tensor.copy_(saved[name])
    from diptych.parallel.moments import set_steps

    set_steps(second, num_steps=3)
    train(through, optimizers=[first], first=3)
    train(resumed, optimizers=[second], first=3)
    for found, expected in zip(resumed.parameters(), through.parameters(), strict=True):
        assert torch.equal(found, expected)


def test_replicas_follow_one_process(ranks, corpus):
    def losses(layout):
        spec = make_spec(
            corpus,
            layout=layout,
            model=TINY_MODEL,
            schedule=TINY_SCHEDULE,
            kind="muon",
            lr=3e-3,
        )
        return ranks(layout.world_size).run(trajectory, spec=spec, num_steps=8)[0]["losses"]

    one = losses(Layout(micro_batch=8))
    two = losses(Layout(engine="ddp", dp=2, micro_batch=4))
    # Its products are in bf16, which tells a gradient's last bit.
    np.testing.assert_allclose(two, one, rtol=5e-3)
    assert one[-1] < 0.95 * one[0]


def sharded():
    from tests.parallel.small import spread_model

    spread_model(
        Layout(engine="fsdp2", shard=2),
        build=partial(build_optimizer, spec=OptimizerSpec(kind="muon")),
    )


def test_sharded_matrices_are_refused(ranks):
    with pytest.raises(AssertionError, match=r"kind is muon, and this layout shards the matrices"):
        ranks(2).run(sharded)
    with pytest.raises(LayoutError, match=r"is MuonAndAdamW, and the layout's engine is zero"):
        zero_runtime.adam(made(model_of()), layout=Layout(engine="zero"))
