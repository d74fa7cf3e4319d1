"""Moments of eight bits: where torchao is there, updated, counted and saved without a loss."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from diptych.core.errors import LayoutError
from diptych.core.records import Layout, ModelShape, OptimizerSpec
from diptych.model.parameters import list_parameters
from diptych.parallel import storage
from diptych.parallel.engine import set_lr
from diptych.parallel.held import Storages, optimizer_tensors_of
from diptych.parallel.moments import set_steps
from diptych.plan.memory import held_bytes
from diptych.plan.states import States, refusal
from diptych.train.optimizers import build_optimizer

SPEC = OptimizerSpec(kind="adamw_8bit", lr=1e-2, weight_decay=0.0)


def test_without_torchao_it_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(LayoutError, match=r"torchao cannot be imported.*diptych\[fp8\]"):
        build_optimizer(nn.Linear(2, 2), spec=SPEC)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (Layout(engine="fsdp2", shard=2), "engine fsdp2 shares weights out"),
        (Layout(engine="zero", shard=2), "engine zero shares weights out"),
        (Layout(dp=2, ddp={"local_sgd_period": 4}), "ddp.local_sgd_period does so"),
    ],
)
def test_layouts_that_cannot_keep_it_are_refused(layout, message):
    assert message in (refusal(layout, states=States(SPEC)) or "")
    assert refusal(Layout(dp=2), states=States(SPEC)) is None


def model_of():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 8))


def train(model, *, optimizer, first=0, num_steps=3):
    for number in range(first, first + num_steps):
        torch.manual_seed(100 + number)
        (model(torch.randn(16, 64)) - 1).square().mean().backward()
        set_lr(optimizer, lr=1e-2 / (1 + number))
        optimizer.step()
        optimizer.zero_grad()


def held_by(optimizer, *, model):
    engine = SimpleNamespace(optimizer=optimizer, module=model)
    weights = Storages(model.parameters())
    return Storages(optimizer_tensors_of(engine), but=[weights]).num_bytes


def predicted_of(model):
    shape = ModelShape(
        family="qwen3_vl", parameters=list_parameters(model), sizes={}, tied_parameters={}
    )
    return held_bytes(shape, layout=Layout(), states=States(SPEC)).optimizer


def test_it_follows_adamw_and_resumes_to_the_last_bit():
    pytest.importorskip("torchao")
    through, plain, resumed = model_of(), model_of(), model_of()
    first = build_optimizer(through, spec=SPEC)
    train(through, optimizer=first)
    train(plain, optimizer=build_optimizer(plain, spec=SPEC.model_copy(update={"kind": "adamw"})))
    moved = torch.linalg.vector_norm(plain[0].weight - model_of()[0].weight)
    apart = torch.linalg.vector_norm(plain[0].weight - through[0].weight)
    assert 0 < apart < 0.05 * moved
    saved = {
        name: tensor.clone()
        for name, tensor in storage.tensors_of(through, optimizer=first).items()
    }
    assert saved["optimizer.0.weight.exp_avg.codes"].dtype == torch.uint8
    assert saved["optimizer.0.weight.exp_avg.scale"].shape == (24,)
    assert saved["optimizer.0.bias.exp_avg"].dtype == torch.float32
    assert held_by(first, model=through) == predicted_of(through)
    second = build_optimizer(resumed, spec=SPEC)
    for name, tensor in storage.tensors_of(resumed, optimizer=second).items():
        tensor.copy_(saved[name])
    set_steps(second, num_steps=3)
    train(through, optimizer=first, first=3)
    train(resumed, optimizer=second, first=3)
    for found, expected in zip(resumed.parameters(), through.parameters(), strict=True):
        assert torch.equal(found, expected)
