from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from diptych.core.records import OptimizerSpec
from diptych.train.optimizers import build_optimizer, learning_rate


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


def test_the_rate_rises_linearly_then_follows_a_cosine_to_its_fraction():
    spec = OptimizerSpec(lr=1.0, warmup_steps=4, final_lr_fraction=0.1)
    rates = [learning_rate(step, spec=spec, num_steps=104) for step in range(105)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4] == 1.0
    assert rates[54] == pytest.approx(0.1 + 0.9 * 0.5)
    assert rates[29] == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4)))
    assert rates[104] == pytest.approx(0.1)
    assert learning_rate(0, spec=spec.model_copy(update={"warmup_steps": 0}), num_steps=9) == 1.0
