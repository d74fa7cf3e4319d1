from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from diptych.core.records import OptimizerSpec, TowerRates
from diptych.parallel.engine import set_lr
from diptych.train.optimizers import build_optimizer


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.linear = nn.Linear(3, 3)
        self.norm = nn.LayerNorm(3)
        self.frozen = nn.Linear(3, 3)
        self.frozen.requires_grad_(False)


def test_only_matrices_decay_and_frozen_weights_are_left_out():
    model = Model()
    optimizer = build_optimizer(model, spec=OptimizerSpec(weight_decay=0.1))
    decayed, plain = optimizer.param_groups
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)
    assert [p.data_ptr() for p in decayed["params"]] == [model.linear.weight.data_ptr()]
    assert {p.data_ptr() for p in plain["params"]} == {
        p.data_ptr()
        for p in (model.embedding.weight, model.linear.bias, model.norm.weight, model.norm.bias)
    }


def test_an_update_is_adamw_s_by_hand():
    model = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(2.0)
    spec = OptimizerSpec(lr=0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.5)
    optimizer = build_optimizer(model, spec=spec)
    model.weight.grad = torch.tensor([[3.0]])
    optimizer.step()
    # First step: both moments are bias-corrected to the gradient itself, so the update is lr.
    assert model.weight.item() == pytest.approx(2.0 * (1 - 0.1 * 0.5) - 0.1, abs=1e-6)


def test_every_group_follows_the_step_s_rate_by_its_scale():
    rates = {"language": TowerRates(lr=0.02)}
    optimizer = build_optimizer(Model(), spec=OptimizerSpec(lr=0.1, towers=rates))
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.02, 0.02])
    set_lr(optimizer, lr=0.05)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.01, 0.01])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"towers": {"vison": {"lr": 1.0}}}, r"no tower 'vison'. Did you mean 'vision'\?"),
        ({"towers": {"vision": {"lr": -1.0}}}, "greater than 0"),
        ({"towers": {"vision": {"lr": float("inf")}}}, "finite"),
        ({"towers": {"vision": {"weight_decay": -0.1}}}, "greater than or equal to 0"),
        ({"towers": {"vision": {"layer_decay": 0.0}}}, "greater than 0"),
        ({"towers": {"vision": {"layer_decay": 1.1}}}, "less than or equal to 1"),
        ({"towers": {"vision": {"rate": 1.0}}}, "Extra inputs"),
        ({"towers": {"connector": {"layer_decay": 0.9}}}, "the connector has no blocks"),
        ({"lr_schedule": "wsd"}, "lr_schedule is wsd and decay_steps is None"),
        ({"decay_steps": 5}, "lr_schedule is cosine and decay_steps is 5"),
        ({"lr_schedule": "wsd", "decay_steps": 0}, "greater than or equal to 1"),
        ({"kind": "sgd"}, "'adamw', 'adamw_8bit' or 'muon'"),
        ({"momentum": 1.0}, "less than 1"),
    ],
)
def test_what_cannot_be_is_refused(fields, message):
    with pytest.raises(ValidationError, match=message):
        OptimizerSpec.model_validate(fields)
