"""Which tensors an optimizer keeps of every weight: made before the first update, named, counted.

An optimizer's groups flow in. AdamW's two moments are what a group has that says nothing else; the
mean of the weights (EMA) is one more, where a group has an `ema_decay`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

EMA = "ema"
_ADAMW = ("exp_avg", "exp_avg_sq")


def moments_of(group: Mapping[str, Any]) -> tuple[str, ...]:
    """Name what is kept of each weight of a group."""
    own: tuple[str, ...] = group.get("moments", _ADAMW)
    return own if group.get("ema_decay") is None else (*own, EMA)


def make_states(optimizer: torch.optim.Optimizer) -> None:
    """Make the states that are not there yet."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not parameter.requires_grad:
                continue
            state = optimizer.state[parameter]
            if _counts(group) and "step" not in state:
                # AdamW makes a parameter's state whole or not at all: before its first update.
                state["step"] = _step_counter(0, parameter=parameter, group=group)
            for moment in moments_of(group):
                if moment not in state:
                    state[moment] = _make(moment, parameter=parameter, optimizer=optimizer)


def first_state(moment: str, *, weights: torch.Tensor) -> torch.Tensor:
    """Make a state as the first update would find it: zeros, or for a mean the weights."""
    if moment == EMA:
        return weights.detach().clone(memory_format=torch.preserve_format)
    return torch.zeros_like(weights, memory_format=torch.preserve_format).detach()


def tensors_in(state: torch.Tensor) -> dict[str, torch.Tensor]:
    """Name the plain tensors of a state: itself, or codes and scales of one of eight bits.

    Its table of values is that of every other.
    """
    if hasattr(state, "codes") and hasattr(state, "scale"):
        return {".codes": state.codes, ".scale": state.scale}  # pyright: ignore[reportAttributeAccessIssue]
    return {"": state}


def set_steps(optimizer: torch.optim.Optimizer, *, num_steps: int) -> None:
    """Set AdamW's step counters (a number, so it is no tensor of a checkpoint)."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if _counts(group) and parameter.requires_grad:
                counter = _step_counter(num_steps, parameter=parameter, group=group)
                optimizer.state[parameter]["step"] = counter


def follow(optimizer: torch.optim.Optimizer) -> None:
    """Have the means of the weights follow every update, where a group asks for them.

    A mean is `decay` times itself and `1 - decay` times the new weight; a skipped step is no
    update.
    """
    if any(group.get("ema_decay") is not None for group in optimizer.param_groups):
        make_states(optimizer)
        optimizer.register_step_post_hook(_follow)


@torch.no_grad()
def _follow(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        weights = [_local(each) for each in group["params"]]
        means = [_local(optimizer.state[each][EMA]) for each in group["params"]]
        if weights:
            torch._foreach_lerp_(means, weights, 1.0 - group["ema_decay"])  # pyright: ignore[reportPrivateImportUsage]


def _make(
    moment: str, *, parameter: torch.Tensor, optimizer: torch.optim.Optimizer
) -> torch.Tensor:
    # Torchao's, which makes states of eight bits.
    own: Callable[..., torch.Tensor] | None = getattr(optimizer, "_new_buffer", None)
    if own is None or moment not in _ADAMW:
        return first_state(moment, weights=parameter)
    return own(parameter, moment == "exp_avg")


def _counts(group: Mapping[str, Any]) -> bool:
    """Whether a group's algorithm counts its updates: AdamW does, Muon does not."""
    return "exp_avg" in moments_of(group)


def _step_counter(
    num_steps: int, *, parameter: torch.Tensor, group: Mapping[str, Any]
) -> torch.Tensor:
    device = parameter.device if group.get("fused") else torch.device("cpu")
    return torch.tensor(float(num_steps), dtype=torch.float32, device=device)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
