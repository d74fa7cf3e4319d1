"""A vision tower that does not train: frozen, named by its weights, read once, then left out.

A model flows in; its features of images flow out, or the model changed so that it takes features
where it took patches. Who keeps the features, and where, is unknown here. Built for `qwen3_vl`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.models.qwen3_vl.modeling_qwen3_vl import (
    BaseModelOutputWithDeepstackFeatures,
    Qwen3VLVisionModel,
)

from diptych.model.families import towers
from diptych.model.freeze import frozen_names


def freeze(model: nn.Module, *, frozen: Sequence[str]) -> None:
    """Take parameters out of training: they get no gradient and no optimizer state.

    Args:
        model: the whole model, not spread over ranks.
        frozen: towers, and patterns over full parameter names.

    Raises:
        ConfigError: see `model.freeze.frozen_names`.
    """
    names = frozen_names(frozen, towers=towers(model))
    for name, parameter in model.named_parameters():
        if name in names:
            parameter.requires_grad_(False)


def vision_sha256(model: nn.Module) -> str:
    """Hash the vision tower's weights; equal towers give equal features."""
    of = towers(model)
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        if of[name] == "vision":
            digest.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}".encode())
            flat = parameter.detach().cpu().contiguous().view(torch.uint8).reshape(-1)
            digest.update(flat.numpy().data)
    return digest.hexdigest()


def feature_width(model: nn.Module) -> int:
    """Return how many numbers a patch's features have: each level the tower's width."""
    tower = _vision(model)
    return (1 + len(tower.deepstack_visual_indexes)) * tower.config.hidden_size


@torch.no_grad()
def compute_features(
    model: nn.Module, *, patches_PD: torch.Tensor, grid_thw_I3: torch.Tensor
) -> torch.Tensor:
    """Run the vision tower and keep what its mergers read.

    Args:
        model: The whole model, not spread over ranks.
        patches_PD: [P, D] float32.
        grid_thw_I3: [I, 3] int64.

    Returns:
        [P, feature_width] in the tower's dtype: DeepStack's levels in their order, then the last.
    """
    tower = _vision(model)
    levels = [*tower.deepstack_visual_indexes, len(tower.blocks) - 1]
    found: dict[int, torch.Tensor] = {}

    def keep(level: int, _: nn.Module, __: Any, output: torch.Tensor) -> None:
        found[level] = output

    hooks = [
        tower.blocks[level].register_forward_hook(partial(keep, level)) for level in set(levels)
    ]
    try:
        tower(patches_PD.to(tower.dtype), grid_thw=grid_thw_I3)
    finally:
        for hook in hooks:
            hook.remove()
    return torch.cat([found[level] for level in levels], dim=1)


def take_features(model: nn.Module) -> None:
    """Make the model read features where it read patches; the tower's blocks run no more."""
    tower = _vision(model)
    tower.forward = partial(_merge, tower)


def _merge(
    tower: Qwen3VLVisionModel, hidden_states: torch.Tensor, grid_thw: torch.Tensor, **_: Any
) -> BaseModelOutputWithDeepstackFeatures:
    # The mergers view several patches as one, which a slice does not allow.
    parts = hidden_states.split(tower.config.hidden_size, dim=1)
    *levels, last = (part.contiguous() for part in parts)
    mergers = tower.deepstack_merger_list
    return BaseModelOutputWithDeepstackFeatures(
        last_hidden_state=last,
        pooler_output=tower.merger(last),
        deepstack_features=[merge(level) for merge, level in zip(mergers, levels, strict=True)],
    )


def _vision(model: nn.Module) -> Qwen3VLVisionModel:
    tower = model.get_submodule("model.visual")
    assert isinstance(tower, Qwen3VLVisionModel), "features are built for qwen3_vl"
    return tower
