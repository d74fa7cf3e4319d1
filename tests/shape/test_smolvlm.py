"""SmolVLM's arithmetic against transformers' own processor and model."""

import random

import pytest
from PIL import Image
from transformers import SmolVLMImageProcessor
from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

from diptych.core.errors import ConfigError
from diptych.core.records import ImageSettings, ModelSpec, TileSettings
from diptych.model.inspect import inspect
from diptych.model.smolvlm import config_of, sizes_of
from diptych.shape.families import family
from diptych.shape.smolvlm import tile_grid

SMOLVLM = family("smolvlm")
SETTINGS = TileSettings(
    side_px=16,
    patch_px=4,
    tile_tokens=4,
    thumbnail=True,
    max_side_px=64,
    placeholder="<image>",
    token="<image>",
    before="<fake_token_around_image><global-img>",
    after="<fake_token_around_image>",
)
SMALL = {
    "text": {
        "vocab_size": 512,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    },
    "vision": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 16,
        "patch_size": 4,
    },
    "model": {"scale_factor": 2},
}
# SmolVLM2-256M-Video-Instruct, from its config.json.
SMOLVLM2_256M = {
    "text": {
        "vocab_size": 49280,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
    },
    "vision": {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "image_size": 512,
        "patch_size": 16,
    },
    "model": {"scale_factor": 4},
}


@pytest.fixture
def sizes():
    return {group: dict(values) for group, values in SMALL.items()}


def _complete(sizes):
    return sizes_of(config_of(sizes, tie_word_embeddings=True, tokens=None))


def _theirs(size_px, **settings):
    """Rows and columns that transformers cuts an image into, and how many tiles it makes."""
    processor = SmolVLMImageProcessor(max_image_size={"longest_edge": 16}, **settings)
    height, width = size_px
    made = processor(
        Image.new("RGB", (width, height)), return_row_col_info=True, return_tensors="np"
    )
    return (made["rows"][0][0], made["cols"][0][0]), made["pixel_values"].shape[1]


def _drawn(seed):
    draw = random.Random(seed)
    return tuple(round(2 ** draw.uniform(0, 8)) for _ in range(2))


SIZES = [
    *(_drawn(seed) for seed in range(60)),
    # Squares, edges of tiles, lines, and what rounding leaves of them.
    *((16, 16), (17, 16), (16, 17), (64, 64), (65, 64), (1, 1), (1, 200), (200, 1), (2, 65)),
]


@pytest.mark.parametrize("longest", [16, 40, 64, 70, None])
def test_tiles_are_those_the_processor_cuts(longest):
    scaled = {"size": {"longest_edge": longest}} if longest else {"do_resize": False}
    image = SETTINGS.model_copy(update={"max_side_px": longest})
    for height, width in SIZES:
        grid, num_tiles = _theirs((height, width), **scaled)
        assert tile_grid((height, width), image=image) == grid, (height, width)
        picture = SMOLVLM.picture(width_px=width, height_px=height, image=image)
        assert picture.num_rows == num_tiles
        assert picture.runs == (4,) * num_tiles
        assert picture.num_patches == 16 * num_tiles


@pytest.mark.parametrize("size_px", [(8, 5000), (5000, 8), (100, 4097)])
def test_no_side_is_scaled_above_4096_px(size_px):
    image = SETTINGS.model_copy(update={"max_side_px": 5000})
    grid, _ = _theirs(size_px, size={"longest_edge": 5000})
    assert tile_grid(size_px, image=image) == grid
    assert max(grid) == 4096 // 16


@pytest.mark.parametrize("size_px", [(16, 16), (20, 64), (64, 20), (64, 64)])
def test_the_text_around_tiles_is_the_processors(size_px):
    image = SETTINGS.model_copy(update={"max_side_px": None})
    rows, columns = tile_grid(size_px, image=image)
    theirs = get_image_prompt_string(
        rows,
        columns,
        4,
        fake_token_around_image="<fake_token_around_image>",
        image_token="<image>",
        global_image_token="<global-img>",
    )
    picture = SMOLVLM.picture(width_px=size_px[1], height_px=size_px[0], image=image)
    assert picture.frame.replace("<image>", "<image>" * 4) == theirs
    assert picture.frame.count("<image>") == len(picture.runs)


def test_fillers_are_single_tiles():
    """They are not scaled up: a filler has as many rows as were asked for."""
    found = SMOLVLM.filler(3, image=SETTINGS)
    assert [each.num_rows for each in found] == [1, 1, 1]
    assert sum(each.num_tokens for each in found) == 12


def test_parameter_count_is_the_published_one():
    """Published: the element count in the checkpoint's safetensors header."""
    spec = ModelSpec(family="smolvlm", sizes=SMOLVLM2_256M, tie_word_embeddings=False)
    assert inspect(spec).num_parameters == 256_484_928


@pytest.mark.parametrize(
    ("group", "name", "value", "message"),
    [
        ("model", "scale", 2, "'scale'.*Allowed: scale_factor"),
        ("model", "scale_factor", 3, "has 4 patches a side, model.scale_factor is 3"),
        ("model", "scale_factor", 0, "model.scale_factor is 0"),
        ("vision", "patch_size", 32, "has 0 patches a side"),
        ("vision", "image_size", [16, 32], r"sizes are \[16, 32\].*Square"),
        ("vision", "model_type", "siglip_vision_model", "'siglip_vision_model'.*family 'llava'"),
        ("vision", "hidden_size", "wide", "sizes.vision cannot work.*hidden_size"),
    ],
)
def test_sizes_that_cannot_work_are_refused(sizes, group, name, value, message):
    sizes[group][name] = value
    with pytest.raises(ConfigError, match=message):
        _complete(sizes)


@pytest.mark.parametrize(
    ("update", "message"),
    [
        ({"side_px": 32}, "image_size is 16, the processor's is 32"),
        ({"patch_px": 8}, "patch_size is 4, the processor's is 8"),
        ({"tile_tokens": 16}, "The model makes 4 tokens of a tile, the processor 16"),
    ],
)
def test_a_processor_with_other_tiles_is_refused(sizes, token_ids, update, message):
    SMOLVLM.check(_complete(sizes), image=SETTINGS, tokens=token_ids)
    with pytest.raises(ConfigError, match=message):
        SMOLVLM.check(_complete(sizes), image=SETTINGS.model_copy(update=update), tokens=token_ids)


def test_a_processor_of_grids_is_refused(sizes, token_ids):
    grid = ImageSettings(patch_px=4, merge=2, temporal_patch=1, min_area_px=64, max_area_px=4096)
    with pytest.raises(ConfigError, match="into a grid, a model of 'smolvlm' takes tiles"):
        SMOLVLM.check(_complete(sizes), image=grid, tokens=token_ids)
