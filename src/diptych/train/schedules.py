"""The learning rate's course: a step in, its rate out.

A linear warm-up, then one of four courses. Towers with rates of their own follow the same one.
"""

from __future__ import annotations

import math

from diptych.core.records import OptimizerSpec


def learning_rate(step: int, *, spec: OptimizerSpec, num_steps: int) -> float:
    """Compute a step's rate (steps count from 0).

    Source: `get_cosine_with_min_lr_schedule_with_warmup`, `get_linear_schedule_with_warmup`,
    `get_wsd_schedule` of transformers.
    Differs: the first step of the warm-up has a rate above 0, the last one the whole rate.
    """
    if step < spec.warmup_steps:
        return spec.lr * (step + 1) / spec.warmup_steps
    left = _left(step, spec=spec, num_steps=num_steps)
    if left == 1.0:
        return spec.lr
    return spec.lr * (spec.final_lr_fraction + (1.0 - spec.final_lr_fraction) * left)


def lr_by_tower(lr: float, *, spec: OptimizerSpec) -> dict[str, float]:
    """Name the rates of towers that have their own, in a step of that rate; {} if none has.

    With a layer decay it is that of the tower's last block.
    """
    return {tower: lr * rates.lr / spec.lr for tower, rates in spec.towers.items() if rates.lr}


def _left(step: int, *, spec: OptimizerSpec, num_steps: int) -> float:
    """Return how much is left of the way from the whole rate to its final fraction."""
    if spec.lr_schedule == "constant":
        return 1.0
    falls = num_steps - spec.warmup_steps if spec.decay_steps is None else spec.decay_steps
    progress = (step - (num_steps - falls)) / max(1, falls)
    progress = min(1.0, max(0.0, progress))
    if spec.lr_schedule == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * progress))
    return 1.0 - progress
