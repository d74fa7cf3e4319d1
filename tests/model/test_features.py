"""A frozen tower's features stand in for patches: same output, same gradients elsewhere."""

from __future__ import annotations

import pytest
import torch

from diptych.model.assemble import build
from diptych.model.features import (
    compute_features,
    feature_width,
    freeze,
    take_features,
    vision_sha256,
)

GRIDS = torch.tensor([[1, 4, 6], [1, 2, 2]])
NUM_TOKENS = 6 + 1


@pytest.fixture
def model(model_spec, token_ids, image_settings):
    return build(model_spec, tokens=token_ids, image=image_settings, seed=3)


@pytest.fixture
def inputs(token_ids, image_settings):
    torch.manual_seed(0)
    ids = torch.randint(10, 100, (1, 16))
    ids[0, 2 : 2 + NUM_TOKENS] = token_ids.image
    return {
        "input_ids": ids,
        "position_ids": torch.arange(16).expand(3, 1, 16),
        "image_grid_thw": GRIDS,
    }


@pytest.fixture
def patches(image_settings):
    width = 3 * image_settings.temporal_patch * image_settings.patch_px**2
    return torch.randn(4 * NUM_TOKENS, width, generator=torch.Generator().manual_seed(1))


def _logits_and_gradient(model, *, inputs, pixel_values):
    model.zero_grad()
    logits = model(pixel_values=pixel_values, **inputs).logits
    logits.square().mean().backward()
    return logits.detach(), model.model.visual.merger.linear_fc1.weight.grad.clone()


def test_features_give_the_same_logits_and_the_connector_the_same_gradient(model, inputs, patches):
    logits, gradient = _logits_and_gradient(model, inputs=inputs, pixel_values=patches)
    features = compute_features(model, patches_PD=patches, grid_thw_I3=GRIDS)
    assert features.shape == (len(patches), feature_width(model))
    assert feature_width(model) == 3 * 128  # two DeepStack levels and the last
    take_features(model)
    again, same = _logits_and_gradient(model, inputs=inputs, pixel_values=features)
    torch.testing.assert_close(again, logits)
    torch.testing.assert_close(same, gradient)
    assert model.model.visual.blocks[0].mlp.linear_fc1.weight.grad is None


def test_images_do_not_see_each_other_in_their_features(model, patches):
    both = compute_features(model, patches_PD=patches, grid_thw_I3=GRIDS)
    alone = compute_features(model, patches_PD=patches[24:], grid_thw_I3=GRIDS[1:])
    torch.testing.assert_close(both[24:], alone)


def test_the_tower_is_named_by_its_own_weights_alone(model):
    name = vision_sha256(model)
    with torch.no_grad():
        model.lm_head.weight.add_(1)
        model.model.visual.merger.linear_fc1.weight.add_(1)
    assert vision_sha256(model) == name
    with torch.no_grad():
        model.model.visual.blocks[0].mlp.linear_fc1.bias[0] += 1
    assert vision_sha256(model) != name


def test_frozen_towers_get_no_gradient(model, inputs, patches):
    freeze(model, frozen=["vision"])
    model(pixel_values=patches, **inputs).logits.sum().backward()
    without = {name for name, value in model.named_parameters() if value.grad is None}
    frozen = {name for name, value in model.named_parameters() if not value.requires_grad}
    assert frozen == {
        name
        for name in dict(model.named_parameters())
        if name.startswith("model.visual.") and "merger" not in name
    }
    assert frozen <= without
