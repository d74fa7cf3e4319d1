"""InternVL's tiles and sizes against transformers' own choice, and by hand."""

from __future__ import annotations

import random

import pytest

from diptych.core.errors import ConfigError
from diptych.core.records import ModelSpec, TileSettings, TokenIds
from diptych.model.families import torch_side
from diptych.model.inspect import inspect
from diptych.shape.families import family
from diptych.shape.internvl import arrange

TOKENS = TokenIds(num_tokens=300, pad=0, eos=1, image=2)
IMAGE = TileSettings(
    side_px=448,
    patch_px=14,
    tile_tokens=256,
    max_tiles=12,
    thumbnail=True,
    placeholder="<IMG_CONTEXT>",
    token="<IMG_CONTEXT>",
    before="<img>",
    after="</img>",
)
TEXT = {
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3}


def spec(**sizes):
    sizes = {"text": {**TEXT, "num_hidden_layers": 2, "num_key_value_heads": 1}} | sizes
    return ModelSpec(family="internvl", sizes={"vision": VISION} | sizes)


def sizes_of(**sizes):
    side = torch_side("internvl")
    return side.sizes_of(side.config_of(spec(**sizes).sizes, tie_word_embeddings=True, tokens=None))


@pytest.mark.parametrize(
    ("width_px", "height_px", "expected"),
    [
        (448, 448, (1, 1)),
        (896, 448, (2, 1)),
        # As square as one tile, and larger than half of four, but not than half of nine.
        (700, 700, (2, 2)),
        (300, 900, (1, 3)),
        (10_000, 10, (12, 1)),
        (10, 10_000, (1, 12)),
        (1, 1, (1, 1)),
    ],
)
def test_tiles_by_hand(width_px, height_px, expected):
    assert arrange(width_px, height_px, side_px=448, least=1, most=12) == expected


@pytest.mark.parametrize(
    ("least", "most", "side_px"), [(1, 12, 448), (1, 6, 32), (2, 6, 64), (4, 4, 448), (1, 40, 28)]
)
def test_tiles_are_those_that_transformers_chooses(least, most, side_px):
    from transformers.models.got_ocr2.image_processing_got_ocr2 import get_optimal_tiled_canvas

    draw = random.Random(most)
    for _ in range(500):
        width, height = (round(2 ** draw.uniform(0, 12)) for _ in range(2))
        theirs = get_optimal_tiled_canvas((height, width), (side_px, side_px), least, most)
        assert arrange(width, height, side_px=side_px, least=least, most=most) == theirs


def test_an_image_of_several_tiles_has_a_small_copy_and_one_of_one_has_none():
    one = family("internvl").picture(width_px=448, height_px=448, image=IMAGE)
    assert (one.num_rows, one.num_patches, one.num_tokens) == (1, 32 * 32, 256)
    assert one.frame == "<img><IMG_CONTEXT></img>"
    wide = family("internvl").picture(width_px=1344, height_px=448, image=IMAGE, num_images=3)
    assert (wide.num_rows, wide.num_patches, wide.runs) == (4, 4 * 32 * 32, (4 * 256,))


def test_fillers_are_single_tiles_even_where_an_image_has_more():
    image = IMAGE.model_copy(update={"min_tiles": 4})
    assert family("internvl").picture(width_px=448, height_px=448, image=image).num_rows == 5
    fillers = family("internvl").filler(3, image=image)
    assert [(filler.num_rows, filler.num_tokens) for filler in fillers] == [(1, 256)] * 3


def test_the_sizes_of_a_released_model_agree_with_its_processor():
    """1024 patches become 256 tokens; the connector reads four patches, 4096 numbers wide."""
    side = torch_side("internvl")
    config = side.config_of({"text": TEXT}, tie_word_embeddings=True, tokens=None)
    sizes = side.sizes_of(config)
    family("internvl").check(sizes, image=IMAGE, tokens=TOKENS)
    assert config.image_seq_length == 256
    shape = inspect(ModelSpec(family="internvl", sizes={"text": TEXT}))
    (reads,) = (
        each for each in shape.parameters if each.name.endswith("projector.linear_1.weight")
    )
    assert reads.shape == (32, 4096)
    widths = family("internvl").widths(sizes).vision
    assert (widths.merged, widths.tile_patches, widths.extra) == (4, 1024, 1)


@pytest.mark.parametrize(
    ("update", "message"),
    [
        ({"side_px": 224}, "image_size is 448, the processor's is 224"),
        ({"patch_px": 28}, "patch_size is 14, the processor's is 28"),
        ({"tile_tokens": 64}, "256 tokens of a tile, the processor 64"),
    ],
)
def test_a_processor_that_cuts_otherwise_is_refused(update, message):
    with pytest.raises(ConfigError, match=message):
        family("internvl").check(sizes_of(), image=IMAGE.model_copy(update=update), tokens=TOKENS)


def test_a_vocabulary_without_the_image_token_is_refused():
    tokens = TOKENS.model_copy(update={"num_tokens": 600})
    with pytest.raises(ConfigError, match="600 tokens, the model's vocab_size is 512"):
        family("internvl").check(sizes_of(), image=IMAGE, tokens=tokens)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"model": {"downsample_ratio": 0.25}}, "downsample_ratio is 0.25"),
        ({"model": {"vision_feature_select_strategy": "full"}}, "select_strategy is full"),
        ({"model": {"vision_feature_layer": [-1, -2]}}, r"vision_feature_layer is \[-1, -2\]"),
        ({"model": {"vision_feature_layer": 4}}, "One of 3 layers: -3 to 3"),
        ({"vision": {**VISION, "image_size": 42}}, "have 3 patches of 14 px a side"),
        ({"vision": {**VISION, "image_size": 13}}, "have 0 patches of 14 px a side"),
        ({"vision": {**VISION, "image_size": [448, 224]}}, r"sizes are \[448, 224\]"),
        ({"vision": {"model_type": "siglip_vision_model"}}, "model_type is 'siglip_vision_model'"),
        ({"text": {"model_type": "qwen3_moe"}}, "'qwen3_moe' has 128 experts"),
        ({"text": {**TEXT, "layers": 2}}, "unknown size 'layers'"),
        ({"model": {"image_seq_length": 256}}, "unknown size 'image_seq_length'"),
    ],
)
def test_sizes_that_cannot_work_are_refused(sizes, message):
    with pytest.raises(ConfigError, match=message):
        inspect(spec(**sizes))
