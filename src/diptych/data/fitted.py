"""Processors around a tokenizer that was trained on the data at hand, by family.

A vocabulary, merges and image settings flow in; a processor of transformers flows out. A family is
one entry of the table below. How a tokenizer is trained is unknown here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from diptych.core.errors import ConfigError, nearest
from diptych.data.described import check_areas

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
    from transformers import Qwen2VLImageProcessor, Qwen3VLProcessor, Qwen3VLVideoProcessor

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
    return Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(size=areas, **cuts),
        tokenizer=tokenizer_of(vocab, merges, special_tokens=_QWEN_TOKENS),
        video_processor=Qwen3VLVideoProcessor(**cuts),
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


_RECIPES = {
    "qwen3_vl": Recipe(special_tokens=_QWEN_TOKENS, build=_qwen3_vl),
    "llava": Recipe(special_tokens=_LLAVA_TOKENS, build=_llava),
}
