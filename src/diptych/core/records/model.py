"""Records of what is trained, free of weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
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


class TowerWeights(Section):
    """Weights that one tower begins with: those of a model that was trained alone.

    The fields are `ModelSpec`'s. Names in `allow_missing` are those of the tower's own model,
    without the place that it has in the composition.
    """

    weights: str
    revision: str | None = None
    weights_sha256: str | None = None
    allow_missing: tuple[str, ...] = ()
    allow_extra: tuple[str, ...] = ()


class Towers(Section):
    """Towers of a composition that begin with weights of their own; None: drawn, from sizes."""

    vision: TowerWeights | None = None
    language: TowerWeights | None = None

    @model_validator(mode="after")
    def _check_any(self) -> Self:
        if self.vision is None and self.language is None:
            raise ValueError("no tower is named; name vision or language, or set towers to null")
        return self


class ModelSpec(Section):
    """Which family, which sizes or weights, and what trains.

    `freeze` has what keeps its weights: names of towers (vision, connector, language, head), and
    patterns over full parameter names (`model.visual.blocks.[0-3].*`). `sizes` is handed to the
    family's config in groups, `text`, `vision` and `model`, named as transformers names them.
    `weights` is a local folder or a hub id; the two exclude each other. `towers` instead has the
    towers of a composition begin with weights of their own. `revision` is a hub id's
    branch, tag or commit, and `weights_sha256` the digest that the weights must have; in a run's
    identity they are the commit and what was found. `allow_missing` and `allow_extra` are globs
    over full names: weights that the files may lack (they are drawn) or have besides.
    `resize_embeddings` gives tokens that the weights do not know rows of their own. `lora` puts
    adapters into towers.
    """

    family: str = "qwen3_vl"
    sizes: dict[str, dict[str, Any]] = Field(default_factory=dict)
    weights: str | None = None
    towers: Towers | None = None
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
        # A recipe that brings weights sets the sizes of the base to null, or a tower's.
        if isinstance(sizes, Mapping):
            return {group: values for group, values in sizes.items() if values is not None}
        return {} if sizes is None else sizes

    @model_validator(mode="after")
    def _check_weights(self) -> Self:
        if self.weights is not None and self.towers is not None:
            raise ValueError(
                f"both 'weights' ('{self.weights}') and 'towers' are set: weights bring every "
                "tower, towers each its own; keep one of them"
            )
        grows = self.towers is not None and self.towers.language is not None
        for name, value in self:
            if self.weights is None and name in _OF_WEIGHTS and value:
                if name == "resize_embeddings" and grows:
                    continue
                where = "'weights'" if self.towers is None else f"'towers.<tower>.{name}'"
                raise ValueError(
                    f"'{name}' is set and there are no weights that it could be about; set "
                    f"{where} to a folder or a hub id, or leave it out"
                )
        return self

    @property
    def has_files(self) -> bool:
        """Whether weights are read from files, all or some of them."""
        return self.weights is not None or self.towers is not None

    @property
    def setting(self) -> str:
        """Where in the parameters the weights are named."""
        return "plan.model"


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
