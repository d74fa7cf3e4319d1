"""Gemma 3's arithmetic against its processor's numbers, and what is refused."""

from __future__ import annotations

import pytest

from diptych.core.errors import ConfigError
from diptych.core.records import ModelSpec, TileSettings, TokenIds
from diptych.model.inspect import inspect
from diptych.shape.families import family
from diptych.shape.gemma3 import check_tokens

TOKENS = TokenIds(num_tokens=262_145, pad=0, eos=106, image=262_144)
IMAGE = TileSettings(
    side_px=896,
    patch_px=14,
    tile_tokens=256,
    placeholder="<start_of_image>",
    token="<image_soft_token>",
    before="\n\n<start_of_image>",
    after="<end_of_image>\n\n",
)
SIZES = {"vision": {"image_size": 896, "patch_size": 14}}


@pytest.mark.parametrize("size", [(896, 896), (1, 4000), (4000, 1), (17, 23)])
def test_an_image_of_any_size_is_one_tile(size):
    """Gemma 3's processor resizes whatever comes to one square: 64 x 64 patches, 256 tokens."""
    picture = family("gemma3").picture(width_px=size[0], height_px=size[1], image=IMAGE)
    assert (picture.num_rows, picture.num_patches, picture.runs) == (1, 64 * 64, (256,))
    assert picture.frame == "\n\n<start_of_image><image_soft_token><end_of_image>\n\n"


def test_the_sizes_of_googles_4b_fit_its_processor():
    family("gemma3").check(SIZES, image=IMAGE, tokens=TOKENS)


def test_googles_4b_is_as_large_as_the_hub_says():
    """Its safetensors hold 4,300,079,472 numbers; 8 heads and 4 key-value heads are 256 wide."""
    shape = inspect(
        ModelSpec(
            family="gemma3",
            sizes={
                "text": {
                    "hidden_size": 2560,
                    "intermediate_size": 10240,
                    "num_hidden_layers": 34,
                    "sliding_window": 1024,
                },
                "vision": {
                    **SIZES["vision"],
                    "hidden_size": 1152,
                    "intermediate_size": 4304,
                    "num_hidden_layers": 27,
                    "num_attention_heads": 16,
                },
            },
        )
    )
    assert shape.num_parameters == 4_300_079_472
    widths = family("gemma3").widths(shape.sizes)
    assert (widths.decoder.queries, widths.decoder.keys) == (2048, 1024)
    # 4 x 4 patches make a token.
    assert (widths.vision.merged, widths.vision.tile_patches, widths.vision.extra) == (16, 4096, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vision": {"image_size": 448, "patch_size": 14}}, "image_size is 448"),
        ({"vision": {"image_size": 896, "patch_size": 28}}, "patch_size is 28"),
        ({"vision": {"image_size": 896, "patch_size": 16}}, "in patches of 16 px"),
        ({**SIZES, "model": {"mm_tokens_per_image": 64}}, "makes 64 tokens of a tile"),
        ({**SIZES, "model": {"mm_tokens_per_image": 200}}, "200 tokens"),
        ({**SIZES, "text": {"vocab_size": 262_144}}, "vocab_size is 262144"),
        ({**SIZES, "text": {"model_type": "llama"}}, "a model of 'gemma3' has a 'gemma3_text'"),
        (
            {"vision": {**SIZES["vision"], "model_type": "clip_vision_model"}},
            "has a 'siglip_vision_model'",
        ),
        ({**SIZES, "text": {"use_bidirectional_attention": True}}, "sees the answer"),
    ],
)
def test_sizes_that_cannot_be_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        family("gemma3").check(change, image=IMAGE, tokens=TOKENS)


def test_defaults_are_those_of_transformers():
    from transformers import Gemma3Config

    from diptych.shape.gemma3 import _DEFAULTS

    config = Gemma3Config()
    for group, part in (
        ("text", config.text_config),
        ("vision", config.vision_config),
        ("model", config),
    ):
        for name, value in _DEFAULTS[group].items():
            assert getattr(part, name) == value, name


@pytest.mark.parametrize(
    ("side_px", "patch_px", "num_tokens"),
    [(900, 14, 256), (896, 14, 9), (896, 14, 255), (8, 14, 1), (896, 14, 0), (896, 14, 128**2)],
)
def test_patches_that_make_no_whole_tokens_are_refused(side_px, patch_px, num_tokens):
    with pytest.raises(ConfigError):
        check_tokens(side_px, patch_px=patch_px, num_tokens=num_tokens)
