"""A live model lists itself as the planner's arithmetic lists it."""

from __future__ import annotations

import pytest
from torch import nn

from diptych.core.errors import ConfigError
from diptych.model.assemble import build
from diptych.model.features import freeze
from diptych.model.inspect import inspect
from diptych.model.parameters import list_parameters

PATTERNS = ("connector", "model.visual.blocks.[0-1].*", "*.embed_tokens.weight")


@pytest.fixture
def fresh_model(model_spec, image_settings, token_ids):
    return build(model_spec, tokens=token_ids, image=image_settings, seed=3)


@pytest.mark.parametrize("entries", [(), ("vision",), PATTERNS])
def test_the_ranks_freeze_what_the_planner_counted(model_spec, fresh_model, entries):
    freeze(fresh_model, frozen=entries)
    shape = inspect(model_spec.model_copy(update={"freeze": entries}))
    assert list_parameters(fresh_model) == shape.parameters
    assert {each.name for each in shape.parameters if each.embeds} == {
        "model.language_model.embed_tokens.weight",
        "model.visual.pos_embed.weight",
    }


def test_a_pattern_that_matches_nothing_stops_before_training(model_spec, fresh_model):
    with pytest.raises(ConfigError, match=r"write 'model\.visual\.merger\.\*'"):
        inspect(model_spec.model_copy(update={"freeze": ("model.visual.merger",)}))
    with pytest.raises(ConfigError, match=r"matches no parameter"):
        freeze(fresh_model, frozen=["model.vision.*"])
    assert all(each.requires_grad for each in fresh_model.parameters())


def test_a_module_of_no_family_is_one_tower():
    module = nn.Sequential(nn.Embedding(3, 2), nn.Linear(2, 2, bias=False))
    module[1].weight.requires_grad_(False)
    listed = [(each.name, each.tower, each.trains, each.embeds) for each in list_parameters(module)]
    assert listed == [("0.weight", "language", True, True), ("1.weight", "language", False, False)]
