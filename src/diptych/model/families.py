"""Where a model's towers and sharding units live, and how transformers' side of a family is called.

A transformers model flows in; names and modules flow out. Which names is the family's data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import ModuleDict, ModuleList
from transformers import PreTrainedConfig

from diptych.core.records import TokenIds
from diptych.model import (
    gemma3,
    internvl,
    llava,
    llava_onevision,
    qwen2_5_vl,
    qwen3_vl,
    smolvlm,
)
from diptych.model.attention.masks import MaskRule, windows_of
from diptych.shape.anatomy import Anatomy, Tower
from diptych.shape.families import family
from diptych.shape.widths import Sizes


class TorchSide(Protocol):
    """What transformers must be told of one family; a module of this package each."""

    def config_of(
        self, sizes: Sizes, *, tie_word_embeddings: bool, tokens: TokenIds | None
    ) -> PreTrainedConfig:
        """Write transformers' config from sizes; without `tokens` its token ids stay the defaults.

        Raises:
            ConfigError: a size is unknown, ill-typed, or cannot work.
        """
        ...

    def sizes_of(self, config: PreTrainedConfig) -> dict[str, dict[str, Any]]:
        """Read the sizes out of a config, complete and checked.

        Raises:
            ConfigError: the config has sizes that cannot work.
        """
        ...

    def token_pairs(
        self, config: PreTrainedConfig, *, tokens: TokenIds
    ) -> tuple[tuple[str, int | None, int | None], ...]:
        """Name each id that both must agree on: its name, the model's, the processor's."""
        ...

    def inputs(
        self,
        *,
        input_ids_BS: torch.Tensor,
        position_ids_3BS: torch.Tensor,
        pixel_values_PD: torch.Tensor | None,
        grid_thw_I3: torch.Tensor | None,
        mask_B1SS: Any,
    ) -> dict[str, Any]:
        """Name what the model's body takes: a micro-batch's tensors as its forward pass calls them.

        Args:
            input_ids_BS: [B, S] int64.
            position_ids_3BS: [3, B, S] int64.
            pixel_values_PD: [P, D] float32, a row a patch or a tile; None without images.
            grid_thw_I3: [I, 3] int64, 1 and each image's `Picture.grid`; None without images.
            mask_B1SS: what the kernel of attention takes for a mask (`attention.kernels.seen_by`):
                None where causal is all, [B, 1, S, S] bool, torch's BlockMask, or one of them by
                kind of layers.
        """
        ...


_SIDES: dict[str, TorchSide] = {
    "qwen3_vl": qwen3_vl,
    "internvl": internvl,
    "llava": llava,
    "qwen2_5_vl": qwen2_5_vl,
    "llava_onevision": llava_onevision,
    "smolvlm": smolvlm,
    "gemma3": gemma3,
}

_RULES: dict[str, Callable[[PreTrainedConfig], MaskRule]] = {"gemma3": gemma3.mask_rule}
"""Families in which a token sees more than what came before it."""


def torch_side(name: str) -> TorchSide:
    """Return the torch side of a family that is built."""
    return _SIDES[family(name).name]


def mask_rule(model: nn.Module) -> MaskRule:
    """Say what a model's layers may see."""
    config = model.config
    assert isinstance(config, PreTrainedConfig), "a model of transformers"
    make = _RULES.get(family_name(model))
    return make(config) if make else MaskRule(windows_of(config.get_text_config()))


@dataclass(frozen=True)
class Unit:
    """A part of a model that is sharded, recomputed or compiled on its own.

    Attributes:
        name: its full name in the model.
        module: a block of a tower, or a module of the connector.
        tower: which tower it is in.
        depth: counts the units of a tower, from 0.
    """

    name: str
    module: nn.Module
    tower: Tower
    depth: int

    @property
    def is_block(self) -> bool:
        """Whether it is one of a tower's layers, not a connector."""
        return self.tower != "connector"


def units(model: nn.Module) -> list[Unit]:
    """List vision blocks, then decoder layers, then the connector's modules."""
    anatomy = _anatomy(model)
    parameters = dict(model.named_parameters())
    found = []
    for path in (*anatomy.block_lists, *anatomy.connectors):
        if path in parameters:
            # A connector's parameter that is in none of its modules stays with the root.
            continue
        part = model.get_submodule(path)
        listed = part.named_children() if isinstance(part, ModuleList) else [("", part)]
        for name, module in listed:
            full = f"{path}.{name}" if name else path
            tower = anatomy.tower(next(f"{full}.{first}" for first, _ in module.named_parameters()))
            depth = sum(unit.tower == tower for unit in found)
            found.append(Unit(name=full, module=module, tower=tower, depth=depth))
    return found


def rest(model: nn.Module, *, units: Sequence[Unit]) -> dict[str, Tower]:
    """Name the modules that hold parameters of their own outside of all units, by their tower."""
    anatomy = _anatomy(model)
    inside = {module for unit in units for module in unit.module.modules()}
    found: dict[str, Tower] = {}
    for name, module in model.named_modules():
        own = next(module.named_parameters(recurse=False), None)
        if own and module not in inside:
            found[name] = anatomy.tower(f"{name}.{own[0]}")
    return found


def layer_classes(model: nn.Module) -> tuple[str, ...]:
    """Name the classes of layers that can be sharded on their own, the outermost first.

    Those are layers with layers in them. The model itself is none, nor a list of layers, nor an
    adapted layer, nor what holds the embedding: the model looks tokens up in it from outside of
    that layer's forward.
    """
    embedding = model.get_input_embeddings()  # pyright: ignore[reportCallIssue]
    found = {
        type(module).__name__: None
        for module in model.modules()
        if module is not model
        and not isinstance(module, ModuleList | ModuleDict)
        and not hasattr(module, "base_layer")
        and any(True for child in module.children() for _ in child.parameters())
        and embedding not in module.modules()
    }
    return tuple(found)


def towers(model: nn.Module) -> dict[str, Tower]:
    """Map every parameter's full name to the tower that it is in."""
    anatomy = _anatomy(model)
    return {name: anatomy.tower(name) for name, _ in model.named_parameters()}


def family_name(model: nn.Module) -> str:
    """Name the family of a model, as its config does."""
    return model.config.model_type  # pyright: ignore[reportAttributeAccessIssue, reportReturnType]


def _anatomy(model: nn.Module) -> Anatomy:
    return family(family_name(model)).anatomy
