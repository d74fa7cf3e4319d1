"""The table of what trains is the optimizer's own; an optimizer that lacks something is told."""

from __future__ import annotations

import pytest
import torch

from diptych.core.errors import RunError
from diptych.core.records import ImageSettings, OptimizerSpec, TokenIds, TowerRates
from diptych.model.assemble import build
from diptych.model.features import freeze
from diptych.train.optimizers import build_optimizer
from diptych.train.trains import what_trains, write_table
from tests.conftest import TINY_MODEL

TOKENS = TokenIds(num_tokens=500, pad=0, eos=1, image=2, video=3, vision_start=4, vision_end=5)
IMAGE = ImageSettings(patch_px=8, merge=2, temporal_patch=1, min_area_px=256, max_area_px=65536)
SPEC = OptimizerSpec(
    lr=1e-3, weight_decay=0.1, towers={"vision": TowerRates(lr=1e-4, weight_decay=0.0)}
)


@pytest.fixture
def model():
    built = build(TINY_MODEL, tokens=TOKENS, image=IMAGE, seed=0)
    freeze(built, frozen=["connector", "model.visual.blocks.0.*"])
    return built


def test_every_tower_is_in_it_with_its_rates(model):
    table = what_trains(model, optimizer=build_optimizer(model, spec=SPEC))
    listed = [(row.tower, row.optimizer, row.lr, row.weight_decay) for row in table.rows]
    assert listed == [
        # Decayed or not, at a decay of 0 it is one row.
        ("vision", "adamw", 1e-4, 0.0),
        ("vision", None, None, None),
        ("connector", None, None, None),
        ("language", "adamw", 1e-3, 0.1),
        ("language", "adamw", 1e-3, 0.0),
    ]
    assert sum(row.num_parameters for row in table.rows) == model.num_parameters()
    assert sum(row.num_tensors for row in table.rows) == len(list(model.parameters()))
    frozen = sum(row.num_parameters for row in table.rows if row.optimizer is None)
    assert frozen == sum(p.numel() for p in model.parameters() if not p.requires_grad)


def test_the_table_in_words(model):
    lines = write_table(
        what_trains(model, optimizer=build_optimizer(model, spec=SPEC))
    ).splitlines()
    assert lines[0].split() == [
        "tower",
        "tensors",
        "parameters",
        "optimizer",
        "lr",
        "weight",
        "decay",
    ]
    assert lines[1].split()[-3:] == ["adamw", "0.0001", "0"]
    assert lines[3].split()[:2] == ["connector", "12"]
    assert lines[3].endswith("frozen")


def test_muon_has_rows_of_its_own(model):
    optimizer = build_optimizer(model, spec=OptimizerSpec(kind="muon"))
    kinds = {(row.tower, row.optimizer) for row in what_trains(model, optimizer=optimizer).rows}
    assert kinds == {
        *((tower, kind) for tower in ("vision", "language") for kind in ("muon", "adamw")),
        ("vision", None),
        ("connector", None),
    }


def test_a_parameter_that_is_forgotten_is_named(model):
    optimizer = build_optimizer(model, spec=SPEC)
    model.model.visual.blocks[0].norm1.bias.requires_grad_(True)
    with pytest.raises(RunError, match=r"visual\.blocks\.0\.norm1\.bias is in no group.*Make it"):
        what_trains(model, optimizer=optimizer)


def test_a_frozen_one_that_would_be_updated_is_named(model):
    optimizer = build_optimizer(model, spec=SPEC)
    model.model.language_model.norm.weight.requires_grad_(False)
    with pytest.raises(RunError, match=r"language_model\.norm\.weight is frozen, and in a group"):
        what_trains(model, optimizer=optimizer)


def test_one_that_would_be_updated_twice_is_named(model):
    optimizer = build_optimizer(model, spec=SPEC)
    twice = model.model.language_model.norm.weight
    optimizer.param_groups[0]["params"].append(twice)
    with pytest.raises(RunError, match=r"language_model\.norm\.weight is in several groups"):
        what_trains(model, optimizer=optimizer)


def test_many_are_counted_and_strange_ones_too(model):
    optimizer = build_optimizer(model, spec=SPEC)
    for group in optimizer.param_groups:
        group["params"] = []
    optimizer.param_groups[0]["params"] = [torch.nn.Parameter(torch.ones(2, 2))]
    with pytest.raises(RunError, match=r"and \d+ more are in no group; 1 tensor\(s\) in its gr"):
        what_trains(model, optimizer=optimizer)
