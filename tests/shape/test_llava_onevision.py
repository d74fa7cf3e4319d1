"""LLaVA-OneVision's tiles, tokens and sizes against transformers' processor, and by hand."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from diptych.core.errors import ConfigError, DataError
from diptych.core.records import ModelSpec, TileSettings, TokenIds
from diptych.data.collate import Multiples
from diptych.model.families import torch_side
from diptych.model.inspect import inspect
from diptych.shape.families import family
from diptych.shape.llava_onevision import UNCUT, best_resolution, default_resolutions, unpadded

TOKENS = TokenIds(num_tokens=300, pad=0, eos=1, image=2)
IMAGE = TileSettings(
    side_px=384,
    patch_px=14,
    tile_tokens=729,
    max_tiles=9,
    resolutions=default_resolutions(384),
    placeholder="<image>",
    token="<image>",
)
TEXT = {
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
VISION = {"image_size": 384, "patch_size": 14}
ONEVISION = family("llava_onevision")


def sizes_of(**sizes):
    side = torch_side("llava_onevision")
    sizes = {"text": TEXT, "vision": VISION} | sizes
    config = side.config_of(sizes, tie_word_embeddings=False, tokens=None)
    return side.sizes_of(config)


def settings(**update):
    return IMAGE.model_copy(update=update)


def test_tokens_by_hand():
    """768 x 384: two tiles, 27 x 54 tokens, a newline a row, and the copy's 27 x 27."""
    picture = ONEVISION.picture(width_px=768, height_px=384, image=IMAGE)
    assert (picture.num_rows, picture.num_patches) == (3, 3 * 729)
    assert picture.runs == (729 + 27 * (54 + 1),)
    assert picture.grid == (384, 768)
    # 768 x 200 in the same two tiles: 200 * 54 / 768 = 14.06 rows; 6 of 27 are cut off twice.
    picture = ONEVISION.picture(width_px=768, height_px=200, image=IMAGE)
    assert picture.runs == (729 + 15 * (54 + 1),)


def test_a_large_image_keeps_the_tokens_of_nine_tiles():
    """36 tiles, 162 x 162 tokens: twice too long each way, so every second stays."""
    picture = ONEVISION.picture(width_px=2304, height_px=2304, image=IMAGE)
    assert (picture.num_rows, picture.runs) == (37, (729 + 81 * 82,))


def test_several_images_are_small_copies():
    for size in ((768, 384), (10, 2000)):
        picture = ONEVISION.picture(width_px=size[0], height_px=size[1], image=IMAGE, num_images=2)
        assert (picture.grid, picture.num_rows, picture.runs) == (UNCUT, 1, (730,))


def _theirs(image):
    from transformers import LlavaOnevisionProcessor

    resolutions = [list(pair) for pair in image.resolutions]
    processor = SimpleNamespace(
        image_processor=SimpleNamespace(image_grid_pinpoints=resolutions),
        num_image_tokens=image.tile_tokens,
        vision_aspect_ratio=f"anyres_max_{image.max_tiles}",
    )
    named = LlavaOnevisionProcessor._get_unpadded_features
    processor._get_unpadded_features = lambda *sizes: named(processor, *sizes)  # pyright: ignore
    return lambda height, width: LlavaOnevisionProcessor._get_number_of_features(
        processor,  # pyright: ignore[reportArgumentType]
        height,
        width,
        image.side_px,
        image.side_px,
    )


@pytest.mark.parametrize(
    "image",
    [
        IMAGE,
        settings(max_tiles=2),
        settings(
            side_px=32, patch_px=8, tile_tokens=16, max_tiles=4, resolutions=default_resolutions(32)
        ),
        settings(resolutions=((384, 768), (768, 384), (768, 768), (1152, 384), (384, 1152))),
    ],
)
def test_tokens_are_as_many_as_transformers_counts(image):
    theirs = _theirs(image)
    draw = random.Random(image.max_tiles)
    num_refused = 0
    for _ in range(2000):
        width, height = (round(2 ** draw.uniform(0, 12)) for _ in range(2))
        expected = theirs(height, width)
        try:
            picture = ONEVISION.picture(width_px=width, height_px=height, image=image)
        except DataError:
            # The model would shrink a side to nothing.
            assert expected == image.tile_tokens
            num_refused += 1
            continue
        assert picture.num_tokens == expected, (width, height)
    assert num_refused < 20


def test_resolutions_are_those_that_transformers_chooses():
    from transformers.image_processing_utils import select_best_resolution

    draw = random.Random(0)
    for _ in range(500):
        width, height = (round(2 ** draw.uniform(0, 12)) for _ in range(2))
        theirs = select_best_resolution((height, width), list(IMAGE.resolutions))
        assert best_resolution(width, height, resolutions=IMAGE.resolutions) == theirs


def test_padding_is_taken_off_as_the_model_does_it():
    import torch
    from transformers.models.llava_onevision.modeling_llava_onevision import unpad_image

    draw = random.Random(0)
    for _ in range(500):
        width, height = (round(2 ** draw.uniform(0, 12)) for _ in range(2))
        rows, columns = draw.randint(1, 40), draw.randint(1, 40)
        theirs = unpad_image(torch.zeros(1, rows, columns), (height, width)).shape[1:]
        assert unpadded(width, height, rows=rows, columns=columns) == tuple(theirs)


def test_an_image_whose_grid_would_shrink_to_nothing_is_refused():
    """2 x 12 tokens where 4 are kept: sqrt(6) times too long, and two rows would be 0.8."""
    image = settings(max_tiles=1, tile_tokens=4, side_px=384, patch_px=192)
    with pytest.raises(DataError, match=r"2304 x 384 px is too narrow.*Crop it"):
        ONEVISION.picture(width_px=2304, height_px=384, image=image)


def test_fillers_are_at_least_two_copies():
    """One copy alone would be an image that is alone, which the model takes for a cut one."""
    least, unit = ONEVISION.least_filler(IMAGE), ONEVISION.unit_rows(IMAGE)
    assert (least, unit) == (2, 1)
    for multiple in (None, 1, 2, 3, 8):
        multiples = Multiples(patches=multiple)
        added = [multiples.num_filler_rows(n, unit=unit, least=least) for n in range(40)]
        assert 1 not in added
        assert added[0] >= 2
        assert max(added) <= multiples.most_filler_rows(unit=unit, least=least)
        if multiple:
            assert all((n + more) % multiple == 0 for n, more in enumerate(added))
        else:
            assert not any(added[1:])
    fillers = ONEVISION.filler(3, image=IMAGE)
    assert [(each.grid, each.num_rows, each.num_tokens) for each in fillers] == [
        (UNCUT, 1, 730)
    ] * 3


def test_the_sizes_of_a_released_model_agree_with_its_processor():
    ONEVISION.check(sizes_of(), image=IMAGE, tokens=TOKENS)
    shape = inspect(ModelSpec(family="llava_onevision", sizes={"text": TEXT}))
    (newline,) = (each for each in shape.parameters if each.name == "model.image_newline")
    assert (newline.tower, newline.block, newline.trains) == ("connector", "", True)


@pytest.mark.parametrize(
    ("update", "message"),
    [
        ({"side_px": 378}, "image_size is 384, the processor's is 378"),
        ({"patch_px": 16}, "patch_size is 14, the processor's is 16"),
        ({"tile_tokens": 728}, "729 tokens of a tile, the processor 728"),
        ({"resolutions": ((384, 384),)}, "image_grid_pinpoints are 36: .*processor's 1: 384 x 384"),
        ({"max_tiles": 4}, "vision_aspect_ratio is anyres_max_9, the processor's anyres_max_4"),
    ],
)
def test_a_processor_that_cuts_otherwise_is_refused(update, message):
    with pytest.raises(ConfigError, match=message):
        ONEVISION.check(sizes_of(), image=settings(**update), tokens=TOKENS)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            {"model": {"vision_feature_select_strategy": "default"}},
            "is default for a tower 'siglip",
        ),
        (
            {"vision": {"model_type": "clip_vision_model"}},
            "is full for a tower 'clip_vision_model'",
        ),
        ({"model": {"vision_aspect_ratio": "anyres"}}, "vision_aspect_ratio is 'anyres'"),
        (
            {"model": {"vision_aspect_ratio": "anyres_max_0"}},
            "vision_aspect_ratio is 'anyres_max_0'",
        ),
        ({"model": {"image_grid_pinpoints": [[384, 400]]}}, r"pinpoints has \[\[384, 400\]\]"),
        ({"model": {"image_grid_pinpoints": []}}, "pinpoints has nothing"),
        ({"text": {"model_type": "mixtral"}}, "'mixtral' has 8 experts"),
        ({"model": {"image_newline": True}}, "unknown size 'image_newline'"),
    ],
)
def test_sizes_that_cannot_work_are_refused(sizes, message):
    with pytest.raises(ConfigError, match=message):
        sizes_of(**sizes)
