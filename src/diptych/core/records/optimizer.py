"""How weights are updated: `train.optimizer` in the parameters, part of a run's identity."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self, get_args

from pydantic import Field, field_validator, model_validator

from diptych.core.errors import nearest
from diptych.core.records.base import Record, Section
from diptych.core.records.layout import TowerName

OptimizerKind = Literal["adamw", "adamw_8bit", "muon"]
_WITH_BLOCKS = ("vision", "language")


class TowerRates(Section):
    """What departs for one tower; None is the optimizer's own.

    `layer_decay`: block i of a tower's n learns at the tower's rate times layer_decay ** (n - 1 -
    i); what comes before the first block (its embeddings) is one block more.
    """

    lr: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    weight_decay: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    layer_decay: float = Field(default=1.0, gt=0, le=1)


class OptimizerSpec(Section):
    """The optimizer, and the learning rate's course after a linear warm-up.

    `kind`: AdamW; AdamW with moments of eight bits; or Muon for the matrices of blocks and AdamW
    for the rest. `momentum` is Muon's. `lr_schedule`: a `cosine` or a `linear` fall to
    `final_lr_fraction` at the end, `constant`, or `wsd`: constant, then a linear fall to that
    fraction over the last `decay_steps`. `towers` have rates of their own; they follow the same
    course.
    """

    kind: OptimizerKind = "adamw"
    lr: float = Field(default=1e-3, gt=0)
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    momentum: float = Field(default=0.95, ge=0, lt=1)
    weight_decay: float = Field(default=0.05, ge=0)
    towers: dict[TowerName, TowerRates] = Field(default_factory=dict)
    lr_schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    warmup_steps: int = Field(default=50, ge=0)
    decay_steps: int | None = Field(default=None, ge=1)
    final_lr_fraction: float = Field(default=0.05, ge=0, le=1)
    max_grad_norm: float = Field(default=1.0, gt=0)

    @field_validator("towers", mode="before")
    @classmethod
    def _check_towers(cls, towers: Any) -> Any:
        allowed = get_args(TowerName)
        for name in towers if isinstance(towers, Mapping) else ():
            if name not in allowed:
                raise ValueError(
                    f"there is no tower '{name}'. {nearest(str(name), allowed=allowed)}"
                )
        return towers

    @field_validator("towers")
    @classmethod
    def _check_layer_decay(cls, towers: dict[TowerName, TowerRates]) -> Any:
        for name, rates in towers.items():
            if rates.layer_decay < 1 and name not in _WITH_BLOCKS:
                raise ValueError(
                    f"{name}.layer_decay is {rates.layer_decay:g}, and the {name} has no blocks; "
                    f"only {' and '.join(_WITH_BLOCKS)} have: give the {name} an lr of its own"
                )
        return towers

    @model_validator(mode="after")
    def _check_schedule(self) -> Self:
        if (self.lr_schedule == "wsd") != (self.decay_steps is not None):
            raise ValueError(
                f"lr_schedule is {self.lr_schedule} and decay_steps is {self.decay_steps}; wsd "
                "falls over the last decay_steps and no other schedule reads it: set both or none"
            )
        return self


class TrainedRow(Record):
    """Parameters of a tower that are updated alike, or are frozen: then the rest is None.

    `part` is whose they are: the tower's own, or of adapters in it. `lr` is the highest of the run:
    that at the end of the warm-up.
    """

    tower: TowerName
    part: Literal["weights", "adapters"] = "weights"
    optimizer: OptimizerKind | None
    lr: float | None
    weight_decay: float | None
    num_tensors: int
    num_parameters: int


class WhatTrains(Record):
    """`what_trains.json`: what trains in a run and how fast, by tower."""

    rows: tuple[TrainedRow, ...]
