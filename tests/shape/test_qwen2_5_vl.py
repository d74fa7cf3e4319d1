"""Qwen2.5-VL's arithmetic against transformers' own model."""

import json
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText
from transformers.vision_utils import get_vision_window_index

from diptych.core.errors import ConfigError
from diptych.core.records import ModelSpec, TileSettings
from diptych.model.inspect import inspect
from diptych.model.qwen2_5_vl import config_of, sizes_of
from diptych.shape.counts import BatchCounts
from diptych.shape.families import family
from diptych.shape.flops import forward_flops
from diptych.shape.qwen2_5_vl import mrope_section

QWEN = family("qwen2_5_vl")
SMALL = {
    "text": {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "vision": {
        "depth": 4,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 4,
        "patch_size": 8,
        "window_size": 64,
        "fullatt_block_indexes": [1, 3],
    },
}
# Qwen2.5-VL-3B-Instruct and 7B-Instruct, from their config.json.
QWEN2_5_VL_3B = {
    "text": {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
    },
    "vision": {"hidden_size": 1280},
}
QWEN2_5_VL_7B = {
    "text": {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
    },
    "vision": {"hidden_size": 1280},
}


@pytest.fixture
def sizes():
    return {group: dict(values) for group, values in SMALL.items()}


def _complete(sizes):
    return sizes_of(config_of(sizes, tie_word_embeddings=True, tokens=None))


@pytest.mark.parametrize(
    ("sizes", "tied", "published"),
    [(QWEN2_5_VL_3B, True, 3_754_622_976), (QWEN2_5_VL_7B, False, 8_292_166_656)],
)
def test_parameter_count_is_the_published_one(sizes, tied, published):
    """Published: half the bytes that the checkpoints' safetensors index says, in bf16."""
    spec = ModelSpec(family="qwen2_5_vl", sizes=sizes, tie_word_embeddings=tied)
    assert inspect(spec).num_parameters == published


def test_the_hubs_flat_config_is_read(tmp_path):
    """Qwen2.5-VL-3B-Instruct's config.json, in which the decoder's sizes stand outside."""
    flat = QWEN2_5_VL_3B["text"] | {
        "model_type": "qwen2_5_vl",
        "rope_theta": 1000000.0,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "sliding_window": 32768,
        "use_sliding_window": False,
        "max_window_layers": 70,
        "tie_word_embeddings": True,
        "vision_config": {"hidden_size": 1280, "in_chans": 3, "out_hidden_size": 2048},
    }
    (tmp_path / "config.json").write_text(json.dumps(flat))
    shape = inspect(ModelSpec(family="qwen2_5_vl", weights=str(tmp_path)))
    assert shape.num_parameters == 3_754_622_976
    assert shape.tied_parameters == {"lm_head.weight": "model.language_model.embed_tokens.weight"}


@pytest.mark.parametrize("num_images", [0, 1, 3])
@pytest.mark.parametrize("seed", range(5))
def test_positions_equal_get_rope_index(sizes, image_settings, num_images, seed):
    config = config_of(sizes, tie_word_embeddings=True, tokens=None)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config).model
    draw = random.Random(seed * 10 + num_images)
    grids = [(2 * draw.randint(1, 6), 2 * draw.randint(1, 6)) for _ in range(num_images)]
    ids, types = [9], [0]
    for rows, columns in grids:
        ids += [7] * (rows * columns // 4) + [11] * draw.randint(1, 9)
        types += [1] * (rows * columns // 4) + [0] * (len(ids) - len(types) - rows * columns // 4)
    expected, _ = model.get_rope_index(
        torch.tensor([ids]),
        mm_token_type_ids=torch.tensor([types]),
        image_grid_thw=torch.tensor([[1, *grid] for grid in grids]) if grids else None,
    )
    ours = QWEN.position_ids(
        np.array(ids, dtype=np.int64), grids=grids, image=image_settings, image_token_id=7
    )
    np.testing.assert_array_equal(ours, expected[:, 0].numpy())


@pytest.mark.parametrize(
    ("head_dim", "section"), [(128, [16, 24, 24]), (64, [8, 12, 12]), (16, [2, 3, 3])]
)
def test_rotary_sections_are_qwens_scaled(head_dim, section):
    assert mrope_section(head_dim) == section


def test_absent_sizes_are_derived(sizes):
    found = _complete(sizes)
    assert found["vision"]["out_hidden_size"] == 128
    assert found["text"]["rope_parameters"]["mrope_section"] == [4, 6, 6]
    assert _complete(found) == found


@pytest.mark.parametrize(
    ("grids", "rel"),
    [
        ([(16, 16)], 0),  # four whole windows
        ([(4, 4)], 0),  # an image smaller than a window
        ([(20, 20), (20, 20)], 0),  # squares with parts of windows at two edges
        ([(24, 34), (28, 20)], 0.1),
        ([(8, 40), (16, 16), (12, 50)], 0.25),
    ],
)
def test_windows_nobody_counted_are_estimated(sizes, grids, rel):
    """Estimated: the FLOPs with windows as transformers cuts them, within so much."""
    _, ends = get_vision_window_index(
        torch.tensor([[1, *grid] for grid in grids]),
        spatial_merge_size=2,
        window_size=64,
        patch_size=8,
    )
    counts = BatchCounts.of([1], image_patches=[a * b for a, b in grids], num_head_tokens=1)
    counted = replace(counts, squared_windows=int((ends.diff() ** 2).sum()))
    shape = inspect(ModelSpec(family="qwen2_5_vl", sizes=sizes))
    estimated, exact = (forward_flops(shape, counts=each).attention for each in (counts, counted))
    assert estimated == pytest.approx(exact, rel=rel or 1e-9)


def test_a_batch_without_image_has_no_windows(sizes):
    counts = BatchCounts.of([10], image_patches=[], num_head_tokens=1)
    shape = inspect(ModelSpec(family="qwen2_5_vl", sizes=sizes))
    # Two layers, one row of ten tokens, width 128.
    assert forward_flops(shape, counts=counts).attention == 2 * 4 * 10 * 10 * 128


@pytest.mark.parametrize(
    ("group", "name", "value", "message"),
    [
        ("text", "hiden_size", 64, "'hiden_size'.*Did you mean 'hidden_size'"),
        ("text", "hidden_size", "wide", "sizes.text cannot work.*hidden_size"),
        ("text", "num_attention_heads", 0, "text.num_attention_heads is 0.*1 or more"),
        ("text", "num_attention_heads", 3, "128 over num_attention_heads 3 is no even number"),
        ("text", "num_key_value_heads", 3, "4 is no multiple of num_key_value_heads 3"),
        ("text", "model_type", "llama", "text.model_type is 'llama'.*'qwen2_5_vl_text'"),
        (
            "text",
            "rope_parameters",
            {"rope_theta": 1e6, "rope_type": "default", "mrope_section": [8, 4, 5]},
            r"\[8, 4, 5\], a head is 32 wide.*sum to 16.*\[4, 6, 6\]",
        ),
        ("vision", "out_hidden_size", 64, "out_hidden_size is 64, text.hidden_size is 128"),
        ("vision", "num_heads", 32, "64 over num_heads 32 is no multiple of 4"),
        ("vision", "window_size", 15, "window_size is 15 px, a token's side 16 px.*such as 64"),
        ("vision", "fullatt_block_indexes", [1, 4], r"\[1, 4\].*from 0 to 3"),
    ],
)
def test_sizes_that_cannot_work_are_refused(sizes, group, name, value, message):
    sizes[group][name] = value
    with pytest.raises(ConfigError, match=message):
        _complete(sizes)


def test_sliding_windows_in_the_decoder_are_refused(sizes):
    sizes["text"] |= {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}
    with pytest.raises(ConfigError, match=r"sliding_attention.*use_sliding_window: false"):
        _complete(sizes)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("patch_px", 14, "patch_size is 8, the processor's is 14"),
        ("merge", 4, "spatial_merge_size is 2, the processor's is 4"),
        ("temporal_patch", 1, "temporal_patch_size is 2, the processor's is 1"),
    ],
)
def test_processor_with_other_patches_is_refused(
    sizes, image_settings, token_ids, field, value, message
):
    QWEN.check(_complete(sizes), image=image_settings, tokens=token_ids)
    other = image_settings.model_copy(update={field: value})
    with pytest.raises(ConfigError, match=message):
        QWEN.check(_complete(sizes), image=other, tokens=token_ids)


@pytest.mark.parametrize("update", [{"num_tokens": 513}, {"image": 512}, {"vision_end": 512}])
def test_tokenizer_larger_than_the_vocabulary_is_refused(sizes, image_settings, token_ids, update):
    tokens = token_ids.model_copy(update=update)
    with pytest.raises(ConfigError, match="513 tokens, the model's vocab_size is 512"):
        QWEN.check(_complete(sizes), image=image_settings, tokens=tokens)


def test_a_processor_of_tiles_is_refused(sizes, token_ids):
    tiles = TileSettings(
        side_px=32, patch_px=8, tile_tokens=16, placeholder="<image>", token="<image>"
    )
    with pytest.raises(ConfigError, match="into tiles, a model of 'qwen2_5_vl' takes a grid"):
        QWEN.check(_complete(sizes), image=tiles, tokens=token_ids)
