"""A live model's parameters as records: names, shapes, towers, and what trains.

A model flows in, on any device, whole or sharded; one `Parameter` for each distinct weight flows
out, in the model's order.
"""

from __future__ import annotations

from torch import nn

from diptych.core.records import Parameter, TowerName
from diptych.model import families
from diptych.shape.families import family


def list_parameters(model: nn.Module) -> tuple[Parameter, ...]:
    """List every distinct parameter; a module of no family is one tower without blocks."""
    kind: str | None = getattr(getattr(model, "config", None), "model_type", None)
    towers: dict[str, TowerName] = dict(families.towers(model)) if kind else {}
    embeddings = embedding_names(model)
    return tuple(
        Parameter(
            name=name,
            shape=tuple(parameter.shape),
            dtype=str(parameter.dtype).removeprefix("torch."),
            tower=towers.get(name, "language"),
            block=family(kind).anatomy.block(name) if kind else "",
            trains=parameter.requires_grad,
            embeds=name in embeddings,
        )
        for name, parameter in model.named_parameters()
    )


def embedding_names(model: nn.Module) -> frozenset[str]:
    """Name the weights of embeddings, by the name that stands for a tied one."""
    weights = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    return frozenset(
        name for name, parameter in model.named_parameters() if id(parameter) in weights
    )
