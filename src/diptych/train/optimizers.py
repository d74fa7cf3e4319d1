"""The optimizer: a model and its spec in, AdamW or Muon over groups of equal rate and decay out.

A group says what is its own: `lr_scale`, which the engines multiply the step's rate by, its
`algorithm`, the `moments` that a checkpoint holds of each of its weights, and `ema_decay` where
their mean is kept.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from diptych.core.records import OptimizerSpec
from diptych.model.parameters import list_parameters
from diptych.shape.groups import Group, group_parameters
from diptych.train.low_bit import build_low_bit
from diptych.train.muon import MuonAndAdamW


def build_optimizer(
    model: nn.Module, *, spec: OptimizerSpec, ema_decay: float | None = None
) -> torch.optim.Optimizer:
    """Build the optimizer of what trains: matrices decay, vectors and embeddings do not.

    AdamW's and Muon's moments are fp32 like the weights; one fused kernel updates AdamW's, sharded
    or not.

    Args:
        model: on this rank, whole or sharded.
        spec: which optimizer, and its rates.
        ema_decay: of the weights' mean, if one is kept.

    Raises:
        ConfigError: a tower has rates of its own, and nothing of it trains.
        LayoutError: the weights are sharded and their optimizer needs them whole, or it is not
            installed.
    """
    by_name = dict(model.named_parameters())
    groups = [
        _settings(group, parameters=by_name, spec=spec, ema_decay=ema_decay)
        for group in group_parameters(list_parameters(model), spec=spec)
    ]
    if spec.kind == "muon":
        return MuonAndAdamW(
            matrices=[group for group in groups if group["algorithm"] == "muon"],
            rest=[group for group in groups if group["algorithm"] == "adamw"],
            spec=spec,
        )
    if spec.kind == "adamw_8bit":
        return build_low_bit(groups, spec=spec)
    return torch.optim.AdamW(groups, lr=spec.lr, betas=spec.betas, eps=spec.eps, fused=True)


def _settings(
    group: Group,
    *,
    parameters: dict[str, nn.Parameter],
    spec: OptimizerSpec,
    ema_decay: float | None,
) -> dict[str, Any]:
    """Write a group as torch's optimizers take it."""
    settings: dict[str, Any] = {
        "params": [parameters[each.name] for each in group.parameters],
        "lr": spec.lr * group.lr_scale,
        "lr_scale": group.lr_scale,
        "weight_decay": group.weight_decay,
        "algorithm": group.algorithm,
    }
    if ema_decay is not None:
        settings["ema_decay"] = ema_decay
    return settings
