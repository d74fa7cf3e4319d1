"""AdamW with decay groups, and the learning rate's course."""

from __future__ import annotations

import math

import torch
from torch import nn

from diptych.core.records import OptimizerSpec


def build_optimizer(model: nn.Module, *, spec: OptimizerSpec) -> torch.optim.AdamW:
    """Build AdamW: matrices decay, vectors (biases, norms) and embeddings do not.

    Its moments are fp32 like the weights; one fused kernel updates them, sharded or not.
    """
    embeddings = {
        id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)
    }
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            decays = parameter.ndim >= 2 and id(parameter) not in embeddings
            (decayed if decays else plain).append(parameter)
    return torch.optim.AdamW(
        [
            {"params": decayed, "weight_decay": spec.weight_decay},
            {"params": plain, "weight_decay": 0.0},
        ],
        lr=spec.lr,
        betas=spec.betas,
        eps=spec.eps,
        fused=True,
    )


def learning_rate(step: int, *, spec: OptimizerSpec, num_steps: int) -> float:
    """Compute a step's rate (steps count from 0): linear warm-up, then a cosine to a fraction."""
    if step < spec.warmup_steps:
        return spec.lr * (step + 1) / spec.warmup_steps
    progress = (step - spec.warmup_steps) / max(1, num_steps - spec.warmup_steps)
    cosine = 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))
    return spec.lr * (spec.final_lr_fraction + (1.0 - spec.final_lr_fraction) * cosine)
