"""Where a model's towers and sharding units live.

A transformers model flows in; names and modules flow out. Which names is the family's data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn
from torch.nn import ModuleList

from diptych.shape.families import family
from diptych.shape.qwen3_vl import Tower


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
    known = family(_family_name(model))
    found = []
    for path in (*known.block_lists, *known.connectors):
        part = model.get_submodule(path)
        listed = part.named_children() if isinstance(part, ModuleList) else [("", part)]
        for name, module in listed:
            full = f"{path}.{name}" if name else path
            tower = known.tower(next(f"{full}.{first}" for first, _ in module.named_parameters()))
            depth = sum(unit.tower == tower for unit in found)
            found.append(Unit(name=full, module=module, tower=tower, depth=depth))
    return found


def rest(model: nn.Module, *, units: Sequence[Unit]) -> dict[str, Tower]:
    """Name the modules that hold parameters of their own outside of all units, by their tower."""
    known = family(_family_name(model))
    inside = {module for unit in units for module in unit.module.modules()}
    found: dict[str, Tower] = {}
    for name, module in model.named_modules():
        own = next(module.named_parameters(recurse=False), None)
        if own and module not in inside:
            found[name] = known.tower(f"{name}.{own[0]}")
    return found


def layer_classes(model: nn.Module) -> tuple[str, ...]:
    """Name the classes of layers that can be sharded on their own, the outermost first.

    Those are layers with layers in them. The model itself is none, nor a list of layers, nor what
    holds the embedding: the model looks tokens up in it from outside of that layer's forward.
    """
    embedding = model.get_input_embeddings()  # pyright: ignore[reportCallIssue]
    found = {
        type(module).__name__: None
        for module in model.modules()
        if module is not model
        and not isinstance(module, ModuleList)
        and any(True for child in module.children() for _ in child.parameters())
        and embedding not in module.modules()
    }
    return tuple(found)


def towers(model: nn.Module) -> dict[str, Tower]:
    """Map every parameter's full name to the tower that it is in."""
    known = family(_family_name(model))
    return {name: known.tower(name) for name, _ in model.named_parameters()}


def _family_name(model: nn.Module) -> str:
    return model.config.model_type  # pyright: ignore[reportAttributeAccessIssue, reportReturnType]
