"""The arithmetic against transformers' own processor and model."""

import math
import random
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForImageTextToText
from transformers.models.qwen2_vl.image_processing_qwen2_vl import (
    Qwen2VLImageProcessor,
    smart_resize,
)

from diptych.core.errors import DataError
from diptych.core.records import ImageSettings, ModelSpec
from diptych.model.inspect import inspect
from diptych.model.qwen3_vl import config_of
from diptych.shape.families import family

QWEN = family("qwen3_vl")
PLAIN = {
    "text": {"hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 1},
    "vision": {"depth": 1, "hidden_size": 32, "num_heads": 2, "deepstack_visual_indexes": []},
}
# Qwen3-VL-2B-Instruct and 8B-Instruct, from their config.json.
QWEN3_VL_2B = {
    "text": {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "vision": {
        "depth": 24,
        "hidden_size": 1024,
        "num_heads": 16,
        "intermediate_size": 4096,
        "deepstack_visual_indexes": [5, 11, 17],
    },
}
QWEN3_VL_8B = {
    "text": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "vision": {"deepstack_visual_indexes": [8, 16, 24]},
}


def settings_of(patch_px, merge, min_area_px, max_area_px):
    return ImageSettings(
        patch_px=patch_px,
        merge=merge,
        temporal_patch=2,
        min_area_px=min_area_px,
        max_area_px=max_area_px,
    )


@settings(max_examples=400, deadline=None)
@given(
    width=st.integers(1, 3000),
    height=st.integers(1, 3000),
    patch_and_merge=st.sampled_from([(8, 2), (14, 2), (16, 2), (16, 1), (14, 4)]),
    areas=st.sampled_from([(1024, 65536), (3136, 1003520), (65536, 16777216)]),
)
def test_grid_equals_smart_resize(width, height, patch_and_merge, areas):
    patch, merge = patch_and_merge
    image = settings_of(patch, merge, *areas)
    if max(width, height) / min(width, height) > 200:
        with pytest.raises(DataError, match=f"{width} x {height} px is too narrow.*200 times"):
            QWEN.grid(width_px=width, height_px=height, image=image)
        return
    resized = smart_resize(height, width, patch * merge, min_pixels=areas[0], max_pixels=areas[1])
    rows, columns = QWEN.grid(width_px=width, height_px=height, image=image)
    assert (rows * patch, columns * patch) == resized
    processor = Qwen2VLImageProcessor(
        patch_size=patch,
        merge_size=merge,
        size={"shortest_edge": areas[0], "longest_edge": areas[1]},
    )
    num_patches = processor.get_number_of_image_patches(height, width)
    picture = QWEN.picture(width_px=width, height_px=height, image=image)
    assert picture.num_patches == picture.num_rows == num_patches
    assert picture.num_tokens * merge**2 == num_patches


def test_grid_equals_what_the_processor_returns(image_settings):
    processor = Qwen2VLImageProcessor(
        patch_size=8, merge_size=2, size={"shortest_edge": 32 * 32, "longest_edge": 256 * 256}
    )
    for width, height in ((64, 32), (33, 97), (5, 9), (700, 500)):
        image = torch.zeros(3, height, width, dtype=torch.uint8)
        grid = processor(image, return_tensors="pt")["image_grid_thw"][0].tolist()
        ours = QWEN.grid(width_px=width, height_px=height, image=image_settings)
        assert grid == [1, *ours], (width, height)


@pytest.fixture(scope="module")
def rope_model():
    config = config_of(PLAIN, tie_word_embeddings=True, tokens=None)
    with torch.device("meta"):
        return AutoModelForImageTextToText.from_config(config).model


@pytest.mark.parametrize("num_images", [0, 1, 2, 3])
@pytest.mark.parametrize("seed", range(5))
def test_positions_equal_get_rope_index(rope_model, image_settings, num_images, seed):
    draw = random.Random(seed * 10 + num_images)
    grids = [(2 * draw.randint(1, 6), 2 * draw.randint(1, 6)) for _ in range(num_images)]
    ids, types = [], []

    def text(least):
        length = draw.randint(least, 9)
        ids.extend(draw.choices(range(10, 90), k=length))
        types.extend([0] * length)

    text(0 if grids else 1)
    for rows, columns in grids:
        ids.extend([7] * (rows * columns // 4))
        types.extend([1] * (rows * columns // 4))
        text(1)
    expected, _ = rope_model.get_rope_index(
        torch.tensor([ids]),
        mm_token_type_ids=torch.tensor([types]),
        image_grid_thw=torch.tensor([[1, *grid] for grid in grids]) if grids else None,
    )
    ours = QWEN.position_ids(
        np.array(ids, dtype=np.int64), grids=grids, image=image_settings, image_token_id=7
    )
    assert ours.dtype == np.int64
    np.testing.assert_array_equal(ours, expected[:, 0].numpy())


def test_positions_cost_less_than_fifty_microseconds(image_settings):
    ids = np.full(60, 9, dtype=np.int64)
    ids[5:17] = ids[30:42] = 7
    best = math.inf
    for _ in range(200):
        start = time.perf_counter()
        QWEN.position_ids(ids, grids=[(6, 8), (8, 6)], image=image_settings, image_token_id=7)
        best = min(best, time.perf_counter() - start)
    assert best < 50e-6


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([7, 7, 1], "2 image tokens are fewer"),
        ([7, 7, 7, 7, 7], "5 image tokens"),
        ([7, 7, 1, 7, 7], "together"),
    ],
)
def test_positions_refuse_tokens_unlike_the_grids(image_settings, ids, message):
    with pytest.raises(AssertionError, match=message):
        QWEN.position_ids(
            np.array(ids, dtype=np.int64), grids=[(4, 4)], image=image_settings, image_token_id=7
        )


@pytest.mark.parametrize(
    ("sizes", "tied", "published"),
    [(QWEN3_VL_2B, True, 2_127_532_032), (QWEN3_VL_8B, False, 8_767_123_696)],
)
def test_parameter_count_is_the_published_one(sizes, tied, published):
    """Published: the element counts in the checkpoints' safetensors headers."""
    assert inspect(ModelSpec(sizes=sizes, tie_word_embeddings=tied)).num_parameters == published


def test_towers_and_blocks(starter_sizes):
    listed = inspect(ModelSpec(sizes=starter_sizes, tie_word_embeddings=False)).parameters
    placed = {each.name: (each.tower, each.block) for each in listed}
    assert placed["model.visual.patch_embed.proj.weight"] == ("vision", "")
    assert placed["model.visual.blocks.3.attn.qkv.bias"] == ("vision", "model.visual.blocks.3")
    assert placed["model.visual.merger.norm.weight"] == ("connector", "")
    assert placed["model.visual.deepstack_merger_list.1.linear_fc1.weight"] == ("connector", "")
    assert placed["model.language_model.embed_tokens.weight"] == ("language", "")
    assert placed["model.language_model.layers.2.mlp.up_proj.weight"] == (
        "language",
        "model.language_model.layers.2",
    )
    assert placed["lm_head.weight"] == ("head", "")
