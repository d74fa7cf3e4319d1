"""What the torch sides of families of tiles have in common: sizes into a config and back, inputs.

Sizes are grouped: `text` and `vision` as transformers' configs of the decoder and the vision tower
name them, with their `model_type`, and `model` as the whole model's config does.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, PreTrainedConfig

from diptych.core.axes import NUM_CHANNELS
from diptych.core.errors import ConfigError, nearest
from diptych.core.records import TokenIds
from diptych.shape.widths import Sizes

_NOT_SIZES = frozenset(field.name for field in dataclasses.fields(PreTrainedConfig))
"""What every config has: ids, dtype and habits of generation, no sizes."""

_GROUPS = ("text", "vision", "model")

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""How transformers' configs call the number of experts."""

_REFUSALS = (TypeError, ValueError, StrictDataclassError)
"""What transformers' configs raise of sizes that they do not take."""


def build_config(
    kind: type[PreTrainedConfig],
    *,
    sizes: Sizes,
    text: str,
    vision: str,
    own: Sequence[str],
    text_ids: Mapping[str, int | None] | None = None,
    **settings: Any,
) -> Any:
    """Write a config from sizes.

    Args:
        kind: the whole model's config.
        sizes: in groups.
        text: transformers' name of the decoder, where the sizes name none.
        vision: the vision tower's name, likewise.
        own: sizes that the group `model` may have.
        text_ids: token ids that the decoder's config is given in place of its defaults.
        settings: what else the config is given.

    Raises:
        ConfigError: a group or a size is unknown, ill-typed, or refused by transformers.
    """
    for group in sizes:
        if group not in _GROUPS:
            raise ConfigError(
                f"plan.model.sizes has an unknown group '{group}'",
                cure=nearest(group, allowed=_GROUPS),
            )
    parts = {
        "text_config": _part(sizes.get("text", {}), group="text", default=text, ids=text_ids),
        "vision_config": _part(sizes.get("vision", {}), group="vision", default=vision),
    }
    model = dict(sizes.get("model", {}))
    _check_names(model, allowed=own, group="model")
    try:
        return kind(**parts, **model, **settings)
    except _REFUSALS as error:
        raise _refused("model", error=error) from error


def read_sizes(
    config: Any, *, own: Sequence[str], check: Callable[[Sizes], None] = lambda sizes: None
) -> dict[str, dict[str, Any]]:
    """Read complete sizes out of a config.

    Args:
        config: the whole model's.
        own: sizes of the group `model`.
        check: refuses what the family cannot work with.

    Raises:
        ConfigError: the decoder is a mixture of experts, or a size cannot work.
    """
    text = config.text_config
    for name in _EXPERTS:
        if getattr(text, name, None):
            raise ConfigError(
                f"The decoder '{text.model_type}' has {getattr(text, name)} experts ({name})",
                allowed="Dense decoders, such as qwen3 or llama",
                cure="Choose sizes or weights of a dense decoder",
            )
    sizes = {
        "text": part_sizes(config.text_config),
        "vision": part_sizes(config.vision_config),
        "model": {name: getattr(config, name) for name in own},
    }
    check(sizes)
    return sizes


def part_sizes(config: PreTrainedConfig) -> dict[str, Any]:
    """Read the sizes out of the config of a decoder or a vision tower."""
    known = [field.name for field in dataclasses.fields(config) if field.name not in _NOT_SIZES]
    values = config.to_dict()
    return {"model_type": config.model_type} | {
        name: values[name] for name in known if name in values
    }


def token_pairs(
    config: PreTrainedConfig, *, tokens: TokenIds
) -> tuple[tuple[str, int | None, int | None], ...]:
    """Name the token id that the model finds images by; older configs call it an index, too."""
    return (("image_token_id", config.image_token_id, tokens.image),)


def inputs(
    *,
    input_ids_BS: torch.Tensor,
    position_ids_3BS: torch.Tensor,
    pixel_values_PD: torch.Tensor | None,
    grid_thw_I3: torch.Tensor | None,
    mask_B1SS: Any,
) -> dict[str, Any]:
    """Name what the model's body takes: tiles, and one position a token."""
    return {
        "input_ids": input_ids_BS,
        "attention_mask": mask_B1SS,
        "position_ids": position_ids_3BS[0],
        "pixel_values": None if pixel_values_PD is None else as_tiles(pixel_values_PD),
    }


def as_tiles(pixel_values_PD: torch.Tensor) -> torch.Tensor:
    """See rows of pixels as square tiles, [T, 3, H, W]."""
    side = math.isqrt(pixel_values_PD.shape[1] // NUM_CHANNELS)
    return pixel_values_PD.view(-1, NUM_CHANNELS, side, side)


def _part(
    sizes: Any, *, group: str, default: str, ids: Mapping[str, int | None] | None = None
) -> PreTrainedConfig:
    values = dict(sizes)
    name = values.pop("model_type", default)
    if name not in CONFIG_MAPPING:
        raise ConfigError(
            f"plan.model.sizes.{group}.model_type is '{name}'",
            allowed="What transformers has, such as siglip_vision_model (vision) or qwen3 (text)",
            cure=nearest(str(name), allowed=tuple(CONFIG_MAPPING)),
        )
    kind: Any = CONFIG_MAPPING[name]
    known = [field.name for field in dataclasses.fields(kind) if field.name not in _NOT_SIZES]
    # A recipe sets a size of the base that the tower does not have to null.
    values = {size: value for size, value in values.items() if size in known or value is not None}
    _check_names(values, allowed=known, group=group)
    try:
        return kind(**values | dict(ids or {}))
    except _REFUSALS as error:
        raise _refused(group, error=error) from error


def _check_names(values: dict[str, Any], *, allowed: Sequence[str], group: str) -> None:
    for name in values:
        if name not in allowed:
            raise ConfigError(
                f"plan.model.sizes.{group} has an unknown size '{name}'",
                cure=nearest(name, allowed=allowed),
            )


def _refused(group: str, *, error: Exception) -> ConfigError:
    told = " ".join(str(error).split())
    return ConfigError(
        f"plan.model.sizes.{group} cannot work: {told}", cure="Correct the sizes it names"
    )
