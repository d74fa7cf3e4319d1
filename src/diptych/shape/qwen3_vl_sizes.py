"""The sizes of a Qwen3-VL: names and defaults are those of transformers' configs.

Sizes come in as two groups, `text` and `vision`, and go out checked and complete.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import PositiveFloat, PositiveInt, ValidationError

from diptych.core.errors import ConfigError, nearest
from diptych.core.records import Section


class TextSizes(Section):
    """The decoder.

    Absent or null, `head_dim` is hidden_size / num_attention_heads, `num_key_value_heads` is
    num_attention_heads and `mrope_section` is Qwen's, scaled to the head.

    Differs: transformers leaves an absent `head_dim` at 128, whatever the width.
    """

    vocab_size: PositiveInt = 151936
    hidden_size: PositiveInt = 4096
    intermediate_size: PositiveInt = 22016
    num_hidden_layers: PositiveInt = 32
    num_attention_heads: PositiveInt = 32
    num_key_value_heads: PositiveInt = 32
    head_dim: PositiveInt = 128
    hidden_act: str = "silu"
    max_position_embeddings: PositiveInt = 128000
    initializer_range: PositiveFloat = 0.02
    rms_norm_eps: PositiveFloat = 1e-6
    attention_bias: bool = False
    rope_theta: PositiveFloat = 500000.0
    mrope_section: tuple[PositiveInt, PositiveInt, PositiveInt] = (24, 20, 20)


class VisionSizes(Section):
    """The vision tower. Absent or null, `out_hidden_size` is the decoder's width."""

    depth: PositiveInt = 27
    hidden_size: PositiveInt = 1152
    hidden_act: str = "gelu_pytorch_tanh"
    intermediate_size: PositiveInt = 4304
    num_heads: PositiveInt = 16
    in_channels: PositiveInt = 3
    patch_size: PositiveInt = 16
    spatial_merge_size: PositiveInt = 2
    temporal_patch_size: PositiveInt = 2
    out_hidden_size: PositiveInt = 3584
    num_position_embeddings: PositiveInt = 2304
    deepstack_visual_indexes: tuple[int, ...] = (8, 16, 24)
    initializer_range: PositiveFloat = 0.02
    rope_theta: PositiveFloat = 10000.0


_Group = TypeVar("_Group", TextSizes, VisionSizes)


def resolve(sizes: Mapping[str, Mapping[str, Any]]) -> tuple[TextSizes, VisionSizes]:
    """Check both groups and fill in what is absent.

    Raises:
        ConfigError: a group or a size is unknown, ill-typed, or cannot work.
    """
    for group in sizes:
        if group not in ("text", "vision"):
            raise ConfigError(
                f"plan.model.sizes has an unknown group '{group}'",
                cure=nearest(group, allowed=("text", "vision")),
            )
    text = _derive_text(_parse(TextSizes, sizes.get("text", {}), group="text"))
    vision = _parse(VisionSizes, sizes.get("vision", {}), group="vision")
    if "out_hidden_size" not in vision.model_fields_set:
        vision = vision.model_copy(update={"out_hidden_size": text.hidden_size})
    _check_text(text)
    _check_vision(vision, text=text)
    return text, vision


def complete(sizes: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Check both groups, and return them as plain values with what was absent filled in.

    Raises:
        ConfigError: as `resolve`.
    """
    text, vision = resolve(sizes)
    return {"text": text.model_dump(mode="json"), "vision": vision.model_dump(mode="json")}


def _parse(kind: type[_Group], values: Mapping[str, Any], *, group: str) -> _Group:
    for name in values:
        if name not in kind.model_fields:
            raise ConfigError(
                f"plan.model.sizes.{group} has an unknown size '{name}'",
                cure=nearest(name, allowed=kind.model_fields),
            )
    try:
        return kind(**{name: value for name, value in values.items() if value is not None})
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        raise ConfigError(
            f"plan.model.sizes.{group}.{name} is {first['input']!r}",
            allowed=first["msg"],
            cure="Correct the value",
        ) from None


def _derive_text(text: TextSizes) -> TextSizes:
    given, heads = text.model_fields_set, text.num_attention_heads
    derived: dict[str, Any] = {}
    if "num_key_value_heads" not in given:
        derived["num_key_value_heads"] = heads
    head_dim = text.head_dim
    if "head_dim" not in given:
        _require(
            text.hidden_size % heads == 0,
            found=f"text.hidden_size {text.hidden_size} is no multiple of "
            f"num_attention_heads {heads}",
            cure="Set text.head_dim, or other heads",
        )
        head_dim = derived["head_dim"] = text.hidden_size // heads
    if "mrope_section" not in given:
        # Qwen's 24 + 20 + 20 of 64 frequencies, scaled; the temporal part takes the remainder.
        half = head_dim // 2
        side = max(half * 20 // 64, 1)
        derived["mrope_section"] = (half - 2 * side, side, side)
    return text.model_copy(update=derived)


def _check_text(text: TextSizes) -> None:
    _require(
        text.num_attention_heads % text.num_key_value_heads == 0,
        found=f"text.num_attention_heads {text.num_attention_heads} is no multiple of "
        f"num_key_value_heads {text.num_key_value_heads}",
        cure="Choose key-value heads that divide the heads",
    )
    _require(
        text.head_dim % 2 == 0 and text.head_dim >= 6,
        found=f"text.head_dim is {text.head_dim}",
        cure="Rotary positions need an even head_dim of 6 or more",
    )
    half, (temporal, height, width) = text.head_dim // 2, text.mrope_section
    _require(
        temporal + height + width == half and 3 * height <= half + 1 and 3 * width <= half,
        found=f"text.mrope_section {list(text.mrope_section)} does not fit "
        f"head_dim {text.head_dim}",
        cure=f"The three must sum to {half}, with height and width at most a third each",
    )


def _check_vision(vision: VisionSizes, *, text: TextSizes) -> None:
    _require(
        vision.out_hidden_size == text.hidden_size,
        found=f"vision.out_hidden_size is {vision.out_hidden_size}, "
        f"text.hidden_size is {text.hidden_size}",
        cure="Leave vision.out_hidden_size out: it is then text.hidden_size",
    )
    _require(
        vision.hidden_size % (4 * vision.num_heads) == 0,
        found=f"vision.hidden_size {vision.hidden_size} over num_heads {vision.num_heads} "
        "is no multiple of 4",
        cure="Two-dimensional rotary positions need a head width that is a multiple of 4",
    )
    _require(
        math.isqrt(vision.num_position_embeddings) ** 2 == vision.num_position_embeddings,
        found=f"vision.num_position_embeddings {vision.num_position_embeddings} is no square",
        cure="The learned positions form a square grid: choose 256, 576, 2304, ...",
    )
    indexes = vision.deepstack_visual_indexes
    _require(
        list(indexes) == sorted(set(indexes))
        and all(0 <= index < vision.depth for index in indexes)
        and len(indexes) <= text.num_hidden_layers,
        found=f"vision.deepstack_visual_indexes is {list(indexes)}",
        cure=f"Name ascending vision layers from 0 to {vision.depth - 1}, at most as many as the "
        f"decoder's {text.num_hidden_layers} layers",
    )


def _require(condition: bool, *, found: str, cure: str) -> None:
    if not condition:
        raise ConfigError(found, cure=cure)
