"""Records of what is trained, free of weights."""

from __future__ import annotations

import math
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from diptych.core.records.base import Record, Section

_OF_WEIGHTS = ("revision", "weights_sha256", "allow_missing", "allow_extra", "resize_embeddings")


class ModelSpec(Section):
    """Which family, which sizes or weights, and what trains.

    `freeze` names towers that keep their weights. `sizes` is handed to the family's config as two
    groups, `text` and `vision`, named as transformers names them. `weights` is a local folder or a
    hub id; the two exclude each other. `revision` is a hub id's branch, tag or commit, and
    `weights_sha256` the digest that the weights must have; in a run's identity they are the commit
    and what was found. `allow_missing` and `allow_extra` are globs over full names: weights that
    the files may lack (they are drawn) or have besides. `resize_embeddings` gives tokens that the
    weights do not know rows of their own.
    """

    family: str = "qwen3_vl"
    sizes: dict[str, dict[str, Any]] = Field(default_factory=dict)
    weights: str | None = None
    revision: str | None = None
    weights_sha256: str | None = None
    allow_missing: tuple[str, ...] = ()
    allow_extra: tuple[str, ...] = ()
    resize_embeddings: bool = False
    tie_word_embeddings: bool = True
    freeze: tuple[Literal["vision", "connector", "language", "head"], ...] = ()

    @field_validator("sizes", mode="before")
    @classmethod
    def _empty(cls, sizes: Any) -> Any:
        # A recipe that brings weights sets the sizes of the base to null.
        return {} if sizes is None else sizes

    @model_validator(mode="after")
    def _check_weights(self) -> Self:
        if self.weights is None:
            for name, value in self:
                if name in _OF_WEIGHTS and value:
                    raise ValueError(
                        f"'{name}' is set and there are no weights that it could be about; set "
                        "'weights' to a folder or a hub id, or leave it out"
                    )
        return self


class Parameter(Record):
    """One line of the model's shape; `block` names the sharding unit that the parameter is in.

    `trains` is false for what gets no gradient, because it is frozen or no loss depends on it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    tower: Literal["vision", "connector", "language", "head"]
    block: str
    trains: bool = True


class ModelShape(Record):
    """`model_shape`: one line per parameter and the widths, free of weights and of torch.

    `frozen` names the towers that keep their weights, `batch_norms` the modules that keep
    statistics of batches, `layer_classes` the classes of layers that can be sharded on their own.
    """

    family: str
    parameters: tuple[Parameter, ...]
    sizes: dict[str, dict[str, Any]]
    tied_parameters: dict[str, str]
    frozen: tuple[Literal["vision", "connector", "language", "head"], ...] = ()
    layer_classes: tuple[str, ...] = ()
    batch_norms: tuple[str, ...] = ()

    @property
    def trained(self) -> tuple[Parameter, ...]:
        """List the parameters that get a gradient and an optimizer's state."""
        return tuple(
            each for each in self.parameters if each.trains and each.tower not in self.frozen
        )

    @property
    def num_parameters(self) -> int:
        """Count the elements of every distinct parameter (a tied one counts once)."""
        return sum(math.prod(parameter.shape) for parameter in self.parameters)
