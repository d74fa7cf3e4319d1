"""Records of what is trained, free of weights."""

from __future__ import annotations

import math
from typing import Any, Literal, Self, get_args

from pydantic import Field, field_validator, model_validator

from diptych.core.records.base import Record, Section
from diptych.core.records.layout import TowerName

AdaptedTower = Literal["vision", "connector", "language"]

_OF_WEIGHTS = ("revision", "weights_sha256", "allow_missing", "allow_extra", "resize_embeddings")


class LoraSpec(Section):
    """Small matrices that learn beside frozen ones: W x + alpha / rank * B A x.

    `towers` are adapted: their own weights are frozen, and nothing is said of the others.
    `targets` are patterns over full names of linear layers in them; without any, every linear
    layer of their blocks. `rank` is what A reduces a row to. `dropout` is that of A's input.
    `dora` has the length of each row of the sum learn on its own (DoRA).
    """

    towers: tuple[AdaptedTower, ...] = ("language",)
    targets: tuple[str, ...] = ()
    rank: int = Field(default=16, ge=1)
    alpha: float = Field(default=32.0, gt=0)
    dropout: float = Field(default=0.0, ge=0, lt=1)
    dora: bool = False

    @field_validator("towers", mode="before")
    @classmethod
    def _check_towers(cls, towers: Any) -> Any:
        if isinstance(towers, list | tuple) and "head" in towers:
            raise ValueError(
                "an adapter stands beside a linear layer of vision, connector or language; head "
                "and embedding get none: take head out of towers, and train it as freeze says"
            )
        if not towers:
            raise ValueError("no tower is named; name one, or set lora to null")
        return towers


class ModelSpec(Section):
    """Which family, which sizes or weights, and what trains.

    `freeze` has what keeps its weights: names of towers (vision, connector, language, head), and
    patterns over full parameter names (`model.visual.blocks.[0-3].*`). `sizes` is handed to the
    family's config in groups, `text`, `vision` and `model`, named as transformers names them.
    `weights` is a local folder or a hub id; the two exclude each other. `revision` is a hub id's
    branch, tag or commit, and `weights_sha256` the digest that the weights must have; in a run's
    identity they are the commit and what was found. `allow_missing` and `allow_extra` are globs
    over full names: weights that the files may lack (they are drawn) or have besides.
    `resize_embeddings` gives tokens that the weights do not know rows of their own. `lora` puts
    adapters into towers.
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
    freeze: tuple[str, ...] = ()
    lora: LoraSpec | None = None

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
    `embeds`: whether it is an embedding's weight.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    tower: TowerName
    block: str
    trains: bool = True
    embeds: bool = False

    @property
    def num_elements(self) -> int:
        """Count its elements."""
        return math.prod(self.shape)


class ModelShape(Record):
    """`model_shape`: one line per parameter and the widths, free of weights and of torch.

    `batch_norms` names the modules that keep statistics of batches, `layer_classes` the classes of
    layers that can be sharded on their own.
    """

    family: str
    parameters: tuple[Parameter, ...]
    sizes: dict[str, dict[str, Any]]
    tied_parameters: dict[str, str]
    layer_classes: tuple[str, ...] = ()
    batch_norms: tuple[str, ...] = ()

    @property
    def trained(self) -> tuple[Parameter, ...]:
        """List the parameters that get a gradient and an optimizer's state."""
        return tuple(each for each in self.parameters if each.trains)

    @property
    def frozen(self) -> tuple[TowerName, ...]:
        """Name the towers that have parameters, of which none trains."""
        there = {each.tower for each in self.parameters}
        train = {each.tower for each in self.parameters if each.trains}
        return tuple(tower for tower in get_args(TowerName) if tower in there - train)

    @property
    def num_parameters(self) -> int:
        """Count the elements of every distinct parameter (a tied one counts once)."""
        return sum(parameter.num_elements for parameter in self.parameters)
