"""Processors around a tokenizer that was trained on the data at hand, by family.

A vocabulary, merges and image settings flow in; a processor of transformers flows out. A family is
one entry of the table below. How a tokenizer is trained is unknown here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from diptych.core.errors import ConfigError, nearest
from diptych.data.described import check_areas, check_num2words
from diptych.shape.internvl import MERGED_SIDE
from diptych.shape.llava_onevision import default_resolutions

if TYPE_CHECKING:
    from diptych.data.processor import ProcessorParams

Merges = list[tuple[str, str]]

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
_DEFAULT_MAX_AREA_PX = 65_536

_CHAT_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' }}
    {%- if message['content'] is string %}
        {%- set items = [{'type': 'text', 'text': message['content']}] %}
    {%- else %}
        {%- set items = message['content'] %}
    {%- endif %}
    {%- if message['role'] == 'assistant' %}
        {%- generation %}
            {%- for item in items if 'text' in item %}
                {{- item['text'] }}
            {%- endfor %}
            {{- '<|im_end|>' }}
        {%- endgeneration %}
        {{- '\\n' }}
    {%- else %}
        {%- for item in items %}
            {%- if 'text' in item %}
                {{- item['text'] }}
            {%- elif item['type'] == 'image' or 'image' in item or 'image_url' in item %}
                {{- 'IMAGE' }}
            {%- endif %}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
"""Qwen's turns; IMAGE is what a family's processor knows an image by."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a family's processor is made.

    Attributes:
        special_tokens: they get the first ids, in this order.
        build: makes the processor of a vocabulary, its merges and the parameters.
    """

    special_tokens: tuple[str, ...]
    build: Callable[[dict[str, int], Merges, ProcessorParams], Any]


def names() -> tuple[str, ...]:
    """Name the families whose processor can be fitted."""
    return tuple(_RECIPES)


def recipe(family: str) -> Recipe:
    """Return a family's recipe.

    Raises:
        ConfigError: no processor of that family can be fitted.
    """
    if family not in _RECIPES:
        raise ConfigError(
            f"prepare.processor.family is '{family}'",
            allowed=f"Can be fitted: {', '.join(sorted(_RECIPES))}",
            cure=nearest(family, allowed=tuple(_RECIPES)),
        )
    return _RECIPES[family]


def chat_template(image: str) -> str:
    """Write the chat template with what stands for an image."""
    return _CHAT_TEMPLATE.replace("IMAGE", image)


def tokenizer_of(
    vocab: dict[str, int], merges: Merges, *, special_tokens: tuple[str, ...], **named: str
) -> Any:
    """Make Qwen's kind of tokenizer; `named` are special tokens that have a name."""
    from transformers import Qwen2Tokenizer

    theirs: Any = merges
    own = [token for token in special_tokens if token not in (TURN_END, END_OF_TEXT)]
    tokens: Any = named or own
    return Qwen2Tokenizer(
        vocab=vocab,
        merges=theirs,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        extra_special_tokens=tokens,
    )


_QWEN_TOKENS = (
    END_OF_TEXT,
    TURN_START,
    TURN_END,
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)


def _qwen3_vl(vocab: dict[str, int], merges: Merges, params: ProcessorParams) -> Any:
    from transformers import Qwen3VLProcessor, Qwen3VLVideoProcessor

    return _qwen(Qwen3VLProcessor, Qwen3VLVideoProcessor, vocab=vocab, merges=merges, params=params)


def _qwen2_5_vl(vocab: dict[str, int], merges: Merges, params: ProcessorParams) -> Any:
    from transformers import Qwen2_5_VLProcessor, Qwen2VLVideoProcessor

    return _qwen(
        Qwen2_5_VLProcessor, Qwen2VLVideoProcessor, vocab=vocab, merges=merges, params=params
    )


def _qwen(
    processor: Any,
    video_processor: Any,
    *,
    vocab: dict[str, int],
    merges: Merges,
    params: ProcessorParams,
) -> Any:
    """Make a processor of Qwen's: one image processor and one template for all of them."""
    from transformers import Qwen2VLImageProcessor

    areas = {
        "shortest_edge": params.min_area_px or (params.patch_px * params.merge) ** 2,
        "longest_edge": params.max_area_px or _DEFAULT_MAX_AREA_PX,
    }
    check_areas(areas, factor_px=params.patch_px * params.merge)
    cuts: dict[str, Any] = {
        "patch_size": params.patch_px,
        "merge_size": params.merge,
        "temporal_patch_size": params.temporal_patch,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    return processor(
        image_processor=Qwen2VLImageProcessor(size=areas, **cuts),
        tokenizer=tokenizer_of(vocab, merges, special_tokens=_QWEN_TOKENS),
        video_processor=video_processor(**cuts),
        chat_template=chat_template("<|vision_start|><|image_pad|><|vision_end|>"),
    )


_LLAVA_TOKENS = (END_OF_TEXT, TURN_START, TURN_END, "<image>")


def _llava(vocab: dict[str, int], merges: Merges, params: ProcessorParams) -> Any:
    """Make LLaVA's processor; images are padded to squares, so that nothing is cut off."""
    from transformers import LlavaImageProcessor, LlavaProcessor

    side_px = params.tile_px
    return LlavaProcessor(
        image_processor=LlavaImageProcessor(
            size={"shortest_edge": side_px},
            crop_size={"height": side_px, "width": side_px},
            do_pad=True,
            image_mean=[0.5, 0.5, 0.5],
            image_std=[0.5, 0.5, 0.5],
        ),
        tokenizer=tokenizer_of(vocab, merges, special_tokens=_LLAVA_TOKENS),
        patch_size=params.patch_px,
        # A vision tower without class token.
        vision_feature_select_strategy="full",
        num_additional_image_tokens=0,
        image_token="<image>",
        chat_template=chat_template("<image>"),
    )


_INTERNVL_NAMES = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}
_INTERNVL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END, *_INTERNVL_NAMES.values())
_INTERNVL_TILES = 12


def _internvl(vocab: dict[str, int], merges: Merges, params: ProcessorParams) -> Any:
    """Make InternVL's processor; a quarter of a tile's patches are as many tokens."""
    from transformers import GotOcr2ImageProcessor, InternVLProcessor, InternVLVideoProcessor

    in_a_row = _in_a_row(params, multiple=MERGED_SIDE) // MERGED_SIDE
    looks: dict[str, Any] = {
        "size": {"height": params.tile_px, "width": params.tile_px},
        "image_mean": [0.485, 0.456, 0.406],
        "image_std": [0.229, 0.224, 0.225],
    }
    return InternVLProcessor(
        image_processor=GotOcr2ImageProcessor(
            crop_to_patches=True,
            min_patches=1,
            max_patches=params.max_tiles or _INTERNVL_TILES,
            **looks,
        ),
        tokenizer=tokenizer_of(vocab, merges, special_tokens=_INTERNVL_TOKENS, **_INTERNVL_NAMES),
        video_processor=InternVLVideoProcessor(**looks),
        image_seq_length=in_a_row**2,
        chat_template=chat_template("<IMG_CONTEXT>\\n"),
    )


_ONEVISION_TOKENS = (END_OF_TEXT, TURN_START, TURN_END, "<image>", "<video>")
_ONEVISION_TILES = 9


def _llava_onevision(vocab: dict[str, int], merges: Merges, params: ProcessorParams) -> Any:
    """Make LLaVA-OneVision's processor for a vision tower without class token."""
    from transformers import (
        LlavaOnevisionImageProcessor,
        LlavaOnevisionProcessor,
        LlavaOnevisionVideoProcessor,
    )

    looks: dict[str, Any] = {
        "size": {"height": params.tile_px, "width": params.tile_px},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    return LlavaOnevisionProcessor(
        image_processor=LlavaOnevisionImageProcessor(
            image_grid_pinpoints=[list(pair) for pair in default_resolutions(params.tile_px)],
            **looks,
        ),
        tokenizer=tokenizer_of(vocab, merges, special_tokens=_ONEVISION_TOKENS),
        video_processor=LlavaOnevisionVideoProcessor(**looks),
        num_image_tokens=_in_a_row(params) ** 2,
        vision_feature_select_strategy="full",
        vision_aspect_ratio=f"anyres_max_{params.max_tiles or _ONEVISION_TILES}",
        image_token="<image>",
        video_token="<video>",
        chat_template=chat_template("<image>\\n"),
    )


def _in_a_row(params: ProcessorParams, *, multiple: int = 1) -> int:
    """Count the patches a side of a tile.

    Raises:
        ConfigError: the tile is not one of whole patches, or of a multiple of so many.
    """
    unit_px = multiple * params.patch_px
    if params.tile_px % unit_px:
        raise ConfigError(
            f"prepare.processor.tile_px is {params.tile_px}, patch_px is {params.patch_px}",
            allowed=f"tile_px is a multiple of {unit_px}",
            cure=f"Set tile_px: {-(-params.tile_px // unit_px) * unit_px}",
        )
    return params.tile_px // params.patch_px


_SMOLVLM_FRAME = ("<fake_token_around_image>", "<image>", "<global-img>")
_SMOLVLM_SIDE = 6
"""Tiles a side that have tokens of their own, as in what Hugging Face released."""

_SMOLVLM_DEFAULT_SIDE = 4
"""Tiles along an image's longer side, likewise."""

_SMOLVLM_TOKENS = (
    END_OF_TEXT,
    TURN_START,
    TURN_END,
    *_SMOLVLM_FRAME,
    *(
        f"<row_{row}_col_{column}>"
        for row in range(1, _SMOLVLM_SIDE + 1)
        for column in range(1, _SMOLVLM_SIDE + 1)
    ),
)


def _smolvlm(vocab: dict[str, int], merges: Merges, params: ProcessorParams) -> Any:
    """Make SmolVLM's processor; `merge` patches a side make one token."""
    from transformers import SmolVLMImageProcessor, SmolVLMProcessor, SmolVLMVideoProcessor

    check_num2words(source="prepare.processor.family: smolvlm")
    tile_px, token_px = params.tile_px, params.patch_px * params.merge
    if tile_px % token_px:
        raise ConfigError(
            f"prepare.processor.tile_px is {tile_px}, a token of {params.merge} patches a side is "
            f"{token_px} px wide",
            allowed=f"tile_px is a multiple of {token_px}",
            cure=f"Set tile_px: {-(-tile_px // token_px) * token_px}",
        )
    longest = params.max_side_px or _SMOLVLM_DEFAULT_SIDE * tile_px
    if longest > _SMOLVLM_SIDE * tile_px:
        raise ConfigError(
            f"prepare.processor.max_side_px is {longest}, tile_px is {tile_px}",
            allowed=f"At most {_SMOLVLM_SIDE} tiles a side, {_SMOLVLM_SIDE * tile_px} px",
            cure="Lower max_side_px, or raise tile_px",
        )
    looks: dict[str, Any] = {
        "size": {"longest_edge": longest},
        "max_image_size": {"longest_edge": tile_px},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    cuts: dict[str, Any] = {"patch_size": params.patch_px, **looks}
    return SmolVLMProcessor(
        image_processor=SmolVLMImageProcessor(**cuts),
        tokenizer=tokenizer_of(vocab, merges, special_tokens=_SMOLVLM_TOKENS),
        video_processor=SmolVLMVideoProcessor(**looks),
        image_seq_len=(tile_px // token_px) ** 2,
        chat_template=chat_template("<image>"),
    )


_GEMMA3_TURN_END = "<end_of_turn>"
_GEMMA3_TOKENS = (
    "<pad>",
    "<bos>",
    "<start_of_turn>",
    _GEMMA3_TURN_END,
    "<start_of_image>",
    "<end_of_image>",
    "<image_soft_token>",
)
"""Those of Google's tokenizer that are used; the end of a turn is the end of an answer."""

_GEMMA3_CHAT_TEMPLATE = """\
{{- bos_token }}
{%- set ns = namespace(system='') %}
{%- for message in messages %}
    {%- if message['content'] is string %}
        {%- set items = [{'type': 'text', 'text': message['content']}] %}
    {%- else %}
        {%- set items = message['content'] %}
    {%- endif %}
    {%- if message['role'] == 'system' %}
        {%- set ns.system = items[0]['text'] + '\n\n' %}
    {%- elif message['role'] == 'assistant' %}
        {{- '<start_of_turn>model\n' }}
        {%- generation %}
            {%- for item in items if 'text' in item %}
                {{- item['text'] | trim }}
            {%- endfor %}
            {{- '<end_of_turn>' }}
        {%- endgeneration %}
        {{- '\n' }}
    {%- else %}
        {{- '<start_of_turn>' + message['role'] + '\n' + ns.system }}
        {%- set ns.system = '' %}
        {%- for item in items %}
            {%- if 'text' in item %}
                {{- item['text'] | trim }}
            {%- elif item['type'] == 'image' or 'image' in item or 'image_url' in item %}
                {{- '<start_of_image>' }}
            {%- endif %}
        {%- endfor %}
        {{- '<end_of_turn>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<start_of_turn>model\n' }}
{%- endif %}
"""
"""Gemma's turns: the model's role is `model`, and what the system says begins the user's turn."""


def _gemma3(vocab: dict[str, int], merges: Merges, params: ProcessorParams) -> Any:
    """Make Gemma 3's processor; `merge` patches a side are averaged into a token."""
    from transformers import Gemma3ImageProcessor, Gemma3Processor, Qwen2Tokenizer

    special: Any = {
        "bos_token": "<bos>",
        "eos_token": _GEMMA3_TURN_END,
        "pad_token": "<pad>",
        "unk_token": None,
        "extra_special_tokens": {
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
            "image_token": "<image_soft_token>",
            "start_of_turn_token": "<start_of_turn>",
        },
    }
    tokens_side = params.tile_px // (params.patch_px * params.merge)
    if tokens_side * params.patch_px * params.merge != params.tile_px or not tokens_side:
        raise ConfigError(
            f"prepare.processor.tile_px is {params.tile_px}, patch_px {params.patch_px} and merge "
            f"{params.merge}: tokens of {params.merge} x {params.merge} patches do not fill a tile",
            allowed=f"A tile of a multiple of {params.patch_px * params.merge} px",
            cure="Change one of the three",
        )
    images: Any = {
        "size": {"height": params.tile_px, "width": params.tile_px},
        "patch_size": params.patch_px,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    theirs: Any = merges
    return Gemma3Processor(
        image_processor=Gemma3ImageProcessor(**images),
        tokenizer=Qwen2Tokenizer(vocab=vocab, merges=theirs, **special),
        image_seq_length=tokens_side**2,
        chat_template=_GEMMA3_CHAT_TEMPLATE,
    )


_RECIPES = {
    "qwen3_vl": Recipe(special_tokens=_QWEN_TOKENS, build=_qwen3_vl),
    "qwen2_5_vl": Recipe(special_tokens=_QWEN_TOKENS, build=_qwen2_5_vl),
    "llava": Recipe(special_tokens=_LLAVA_TOKENS, build=_llava),
    "internvl": Recipe(special_tokens=_INTERNVL_TOKENS, build=_internvl),
    "llava_onevision": Recipe(special_tokens=_ONEVISION_TOKENS, build=_llava_onevision),
    "smolvlm": Recipe(special_tokens=_SMOLVLM_TOKENS, build=_smolvlm),
    "gemma3": Recipe(special_tokens=_GEMMA3_TOKENS, build=_gemma3),
}
