"""What others need to know of a processor: its family, how it cuts images, its tokens' ids.

A processor of transformers flows in; records flow out. A family is one entry of the table below.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from diptych.core.errors import ConfigError
from diptych.core.records import AnyImageSettings, ImageSettings, TileSettings, TokenIds
from diptych.shape.gemma3 import check_tokens
from diptych.shape.internvl import MERGED_SIDE
from diptych.shape.llava_onevision import max_tiles

_GEMMA3_PATCH_PX = 14
"""The patches of every Gemma 3 that Google released; its processor does not say."""

_SMOLVLM_PATCHES_PX = {(512, 64): 16, (384, 81): 14, (364, 169): 14}
"""The patches' side of what Hugging Face released, by a tile's side and number of tokens."""


_LEVEL = 1e-4
"""Levels of a colour that are closer than this are one."""


@dataclass(frozen=True, kw_only=True)
class Description:
    """What `processor.json` says beside its hash."""

    family: str
    image: AnyImageSettings
    tokens: TokenIds


def describe(processor: Any, *, source: str) -> Description:
    """Describe a processor of a family that is built.

    Raises:
        ConfigError: it is of another family, or has no token for images.
    """
    name = type(processor).__name__
    if name not in _DESCRIBED:
        raise ConfigError(
            f"'{source}' holds a {name}",
            allowed=f"Built: {', '.join(sorted(_DESCRIBED))}",
            cure="Name a processor of a family that is built",
        )
    family, images = _DESCRIBED[name]
    image = images(processor)
    tokens = _TOKENS.get(family, _tokens)(processor, source=source)
    if isinstance(image, ImageSettings):
        tokens = _with_vision_tokens(tokens, tokenizer=processor.tokenizer)
    return Description(family=family, image=image, tokens=tokens)


def check_num2words(*, source: str) -> None:
    """Refuse SmolVLM's processor where the package that spells numbers in videos is missing.

    transformers makes no such processor without it, videos or not.

    Raises:
        ConfigError: num2words is not installed.
    """
    if find_spec("num2words") is None:
        raise ConfigError(
            f"'{source}' needs the package num2words",
            allowed="transformers makes SmolVLM's processor only where it is installed",
            cure="pip install 'diptych[smolvlm]'",
        )


def processor_of(family: str) -> str:
    """Name the class of a family's processor."""
    return next(name for name, (found, _) in _DESCRIBED.items() if found == family)


def set_areas(processor: Any, *, low: int | None, high: int | None) -> None:
    """Bound the area of images, in px, where one is one grid.

    Raises:
        ConfigError: the family cuts tiles, or no image fits the bounds.
    """
    image = processor.image_processor
    if not hasattr(image, "merge_size"):
        raise ConfigError(
            "prepare.processor sets min_area_px or max_area_px, and this processor cuts tiles",
            cure="Leave both out",
        )
    areas = {
        "shortest_edge": low or image.size["shortest_edge"],
        "longest_edge": high or image.size["longest_edge"],
    }
    check_areas(areas, factor_px=image.patch_size * image.merge_size)
    image.size = areas


def check_areas(areas: dict[str, int], *, factor_px: int) -> None:
    """Refuse bounds between which no image can be made.

    Raises:
        ConfigError: the upper one is below the lower one, or below one token's area.
    """
    low, high = areas["shortest_edge"], areas["longest_edge"]
    if high < max(low, factor_px**2):
        raise ConfigError(
            f"Images between min_area_px {low} and max_area_px {high} px cannot be made",
            allowed=f"max_area_px is at least min_area_px and {factor_px**2} px, one image token",
            cure="Raise prepare.processor.max_area_px or lower min_area_px",
        )


def _native(processor: Any) -> ImageSettings:
    image = processor.image_processor
    return ImageSettings(
        patch_px=image.patch_size,
        merge=image.merge_size,
        temporal_patch=image.temporal_patch_size,
        min_area_px=image.size["shortest_edge"],
        max_area_px=image.size["longest_edge"],
    )


def _llava(processor: Any) -> TileSettings:
    side_px, patch_px = _side(processor.image_processor), processor.patch_size
    num_tokens = (side_px // patch_px) ** 2 + processor.num_additional_image_tokens
    if processor.vision_feature_select_strategy == "default":
        num_tokens -= 1
    return TileSettings(
        side_px=side_px,
        patch_px=patch_px,
        tile_tokens=num_tokens,
        placeholder=processor.image_token,
        token=processor.image_token,
    )


def _internvl(processor: Any) -> TileSettings:
    """Describe InternVL's processor, which says how many tokens a tile has, a quarter its patches.

    Source: `InternVLProcessor`, which cuts tiles whatever its image processor's own setting is.
    """
    image, num_tokens = processor.image_processor, processor.image_seq_length
    side_px = _side(image)
    return TileSettings(
        side_px=side_px,
        patch_px=_patch_px(side_px, num_patches=MERGED_SIDE**2 * num_tokens),
        tile_tokens=num_tokens,
        min_tiles=image.min_patches,
        max_tiles=image.max_patches,
        thumbnail=True,
        placeholder=processor.image_token,
        token=processor.image_token,
        before=processor.start_image_token,
        after=processor.end_image_token,
    )


def _llava_onevision(processor: Any) -> TileSettings:
    image, num_tokens = processor.image_processor, processor.num_image_tokens
    side_px = _side(image)
    if processor.vision_feature_select_strategy == "default":
        num_tokens -= 1
    resolutions = tuple((height, width) for height, width in image.image_grid_pinpoints)
    if any(px % side_px for pair in resolutions for px in pair) or not resolutions:
        raise ConfigError(
            f"The image processor's image_grid_pinpoints are {list(resolutions)}",
            allowed=f"(height, width) of whole tiles, multiples of {side_px} px",
            cure="Use the processor that belongs to the model",
        )
    return TileSettings(
        side_px=side_px,
        patch_px=_patch_px(side_px, num_patches=num_tokens),
        tile_tokens=num_tokens,
        max_tiles=max_tiles(processor.vision_aspect_ratio),
        resolutions=resolutions,
        placeholder=processor.image_token,
        token=processor.image_token,
    )


def _patch_px(side_px: int, *, num_patches: int) -> int:
    """Return the largest side of patches of which a tile has so many.

    Raises:
        ConfigError: no patches are so many.
    """
    in_a_row = math.isqrt(num_patches)
    patch_px = side_px // in_a_row if in_a_row else 0
    if in_a_row**2 != num_patches or not patch_px or side_px // patch_px != in_a_row:
        raise ConfigError(
            f"The processor's tiles of {side_px} px would have {num_patches} patches",
            allowed="As many as square patches of whole px make, such as 32 x 32 in 448 px",
            cure="Use the processor that belongs to the model",
        )
    return patch_px


def _smolvlm(processor: Any) -> TileSettings:
    """Describe SmolVLM's images: tiles of `max_image_size`, cut out of an image of `size`.

    A processor that does not split makes one tile, as one does that scales images to a tile's side.
    The processor does not say how large patches are; a fitted one does, in `patch_size`.
    """
    image, num_tokens = processor.image_processor, processor.image_seq_len
    side_px = image.max_image_size["longest_edge"]
    patch_px = getattr(image, "patch_size", None) or _SMOLVLM_PATCHES_PX.get((side_px, num_tokens))
    if patch_px is None:
        raise ConfigError(
            f"The processor makes {num_tokens} tokens of {side_px} px, and does not say how large "
            "patches are",
            allowed=f"Known without: {list(_SMOLVLM_PATCHES_PX)} (px, tokens)",
            cure="Write the vision tower's `patch_size` into the image processor's settings",
        )
    in_a_row, tokens_in_a_row = side_px // patch_px, math.isqrt(num_tokens)
    if not num_tokens or tokens_in_a_row**2 != num_tokens or in_a_row % tokens_in_a_row:
        raise ConfigError(
            f"image_seq_len is {num_tokens}, and a tile of {side_px} px has {in_a_row} x "
            f"{in_a_row} patches of {patch_px} px",
            allowed="A square number of tokens, each of as many patches",
            cure="Use the processor that belongs to the model",
        )
    _refuse_zeros(image)
    fake = processor.fake_image_token
    return TileSettings(
        side_px=side_px,
        patch_px=patch_px,
        tile_tokens=num_tokens,
        thumbnail=bool(image.do_image_splitting),
        max_side_px=_longest_side(image) if image.do_image_splitting else side_px,
        placeholder=processor.image_token,
        token=processor.image_token,
        before=fake + processor.global_image_token,
        after=fake,
    )


def _longest_side(image: Any) -> int | None:
    if not image.do_resize:
        return None
    longest = image.size.get("longest_edge")
    if longest is None:
        raise ConfigError(
            f"The image processor scales images to {dict(image.size)}",
            allowed="A longest_edge, which keeps an image's proportions",
            cure="Set its size to {'longest_edge': ...}",
        )
    return longest


def _refuse_zeros(image: Any) -> None:
    """Refuse numbers of which a tile of one colour is zero all over: the model would drop it.

    Raises:
        ConfigError: there is such a colour.
    """
    zeros = [0.0, 0.0, 0.0]
    if image.do_normalize:
        scale = image.rescale_factor if image.do_rescale else 1.0
        zeros = [mean / scale for mean in image.image_mean]
    if all(abs(zero - round(zero)) < _LEVEL and 0 <= round(zero) <= 255 for zero in zeros):
        raise ConfigError(
            f"The image processor makes zeros of the colour {[round(zero) for zero in zeros]}, and "
            "SmolVLM drops a tile that is all zero",
            allowed="do_normalize with an image_mean between two levels, such as 0.5",
            cure="Set image_mean and image_std to [0.5, 0.5, 0.5]",
        )


def _gemma3(processor: Any) -> TileSettings:
    """Describe Gemma 3's images; the frame is what its processor writes around the tokens.

    A fitted processor says in `patch_size` how large patches are.
    """
    image, token = processor.image_processor, processor.tokenizer.image_token
    if image.do_pan_and_scan or processor.images_kwargs.get("do_pan_and_scan"):
        raise ConfigError(
            "The image processor has do_pan_and_scan on, which cuts crops out of long images",
            allowed="One square an image, as Gemma 3's processor makes it by default",
            cure="Set do_pan_and_scan to false in its preprocessor_config.json",
        )
    side_px = _side(image)
    patch_px = getattr(image, "patch_size", None) or _GEMMA3_PATCH_PX
    num_tokens = processor.image_seq_length
    check_tokens(side_px, patch_px=patch_px, num_tokens=num_tokens)
    before, after = processor.full_image_sequence.split(token * num_tokens)
    return TileSettings(
        side_px=side_px,
        patch_px=patch_px,
        tile_tokens=num_tokens,
        placeholder=processor.boi_token,
        token=token,
        before=before,
        after=after,
    )


def _side(image: Any) -> int:
    """Read the side in px of the squares that an image processor makes.

    Raises:
        ConfigError: it makes none.
    """
    crops = getattr(image, "do_center_crop", False) or getattr(image, "do_pad", False)
    size = image.crop_size if crops and image.crop_size else image.size
    height, width = size.get("height"), size.get("width")
    if height is None or height != width:
        raise ConfigError(
            f"The image processor makes images of {dict(size)}",
            allowed="Squares of one size",
            cure="Set its crop_size, or its size, to equal height and width",
        )
    return height


def _tokens(processor: Any, *, source: str) -> TokenIds:
    return _token_ids(processor, image=processor.image_token_id, source=source)


def _gemma3_tokens(processor: Any, *, source: str) -> TokenIds:
    """Name Gemma 3's tokens.

    Its processor's own image token is the one that stands for an image in a chat. Turns end with a
    token of their own, and not with the tokenizer's `eos_token`.
    """
    tokenizer = processor.tokenizer
    found = _token_ids(processor, image=tokenizer.image_token_id, source=source)
    turn_end = tokenizer.get_vocab().get("<end_of_turn>", found.eos)
    ends = {"vision_start": tokenizer.boi_token_id, "vision_end": tokenizer.eoi_token_id}
    return found.model_copy(update={"eos": turn_end, **ends})


def _token_ids(processor: Any, *, image: int | None, source: str) -> TokenIds:
    tokenizer = processor.tokenizer
    pad, eos = tokenizer.pad_token_id, tokenizer.eos_token_id
    # A name that is no token of its own is read as the unknown token, or as those of its letters.
    names = {processor.image_token, getattr(tokenizer, "image_token", None)}
    found = None if image is None else tokenizer.convert_ids_to_tokens(image)
    if image is None or found not in names or found not in tokenizer.get_added_vocab():
        raise ConfigError(
            f"The tokenizer of '{source}' has no token for images",
            allowed="A tokenizer in which the processor's image token is one token",
            cure="Use the tokenizer that belongs to the processor, or add the token to it",
        )
    return TokenIds(
        num_tokens=len(tokenizer),
        pad=eos if pad is None else pad,
        eos=eos,
        image=image,
        video=getattr(processor, "video_token_id", None),
        vision_start=getattr(processor, "vision_start_token_id", None),
        vision_end=getattr(processor, "vision_end_token_id", None),
    )


def _with_vision_tokens(tokens: TokenIds, *, tokenizer: Any) -> TokenIds:
    """Look up what Qwen's templates write around an image, which not every processor names."""
    known = tokenizer.get_vocab()
    found = {
        name: known.get(f"<|{name}|>")
        for name in ("vision_start", "vision_end")
        if getattr(tokens, name) is None
    }
    return tokens.model_copy(update=found)


_DESCRIBED: dict[str, tuple[str, Callable[[Any], AnyImageSettings]]] = {
    "Qwen3VLProcessor": ("qwen3_vl", _native),
    "Qwen2_5_VLProcessor": ("qwen2_5_vl", _native),
    "LlavaProcessor": ("llava", _llava),
    "InternVLProcessor": ("internvl", _internvl),
    "LlavaOnevisionProcessor": ("llava_onevision", _llava_onevision),
    "SmolVLMProcessor": ("smolvlm", _smolvlm),
    "Gemma3Processor": ("gemma3", _gemma3),
}
"""By the class of the processor: the family, and how its images are described."""

_TOKENS: dict[str, Callable[..., TokenIds]] = {"gemma3": _gemma3_tokens}
"""Families whose processors name their tokens in their own way."""
