"""Where a model's towers and sharding units live.

A transformers model flows in; names and modules flow out. Which names is the family's data.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from diptych.shape.families import family
from diptych.shape.qwen3_vl import Tower

if TYPE_CHECKING:
    from torch import nn


def blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """List the sharding units by full name: vision blocks, then decoder layers."""
    return [
        (f"{path}.{index}", module)
        for path in family(_family_name(model)).block_lists
        for index, module in enumerate(model.get_submodule(path).children())
    ]


def towers(model: nn.Module) -> dict[str, Tower]:
    """Map every parameter's full name to the tower that it is in."""
    known = family(_family_name(model))
    return {name: known.tower(name) for name, _ in model.named_parameters()}


def _family_name(model: nn.Module) -> str:
    return model.config.model_type  # pyright: ignore[reportAttributeAccessIssue, reportReturnType]
