"""The cross-entropy of label tokens, made by the head itself, so that it never holds all logits.

In: a head, hidden states and targets. Out: losses, and gradients that are made beside them. It runs
inside the head's call: what hooks into that (DeepSpeed gathers the weight) sees one call of every
micro-batch, however many tokens and chunks this rank has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from diptych.core.errors import LayoutError
from diptych.core.records import MemoryOptions

_HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Losses:
    """The losses of some tokens, and the gradients of their sum; None where it is not asked for.

    Attributes:
        losses_L: [L] fp32, or the hidden states' dtype if that is wider.
        hidden_LD: [L, D] gradient.
        weight_VD: [V, D] gradient.
    """

    losses_L: torch.Tensor
    hidden_LD: torch.Tensor | None
    weight_VD: torch.Tensor | None


_Compute = Callable[..., Losses]


def make_losses(head: nn.Module, *, options: MemoryOptions, label_smoothing: float = 0.0) -> None:
    """Have a head return losses where it is called with `targets_L`; without, it is as before.

    Args:
        head: changed in place.
        options: how losses are made.
        label_smoothing: of a head that trains; in evaluation labels are as they are.

    Raises:
        LayoutError: the head is no linear layer without bias, or the kernel is not there or does
            not smooth labels.
    """
    if options.loss == "whole":
        return
    if not isinstance(head, nn.Linear) or head.bias is not None:
        raise LayoutError(
            f"The head is {head}, and memory.loss is {options.loss}",
            allowed="It is built for a linear layer without bias",
            cure="Set memory.loss to whole",
        )
    if options.loss == "fused":
        compute = smoothed = _liger(label_smoothing=label_smoothing)
    else:
        compute = partial(by_chunk, chunk_tokens=options.loss_chunk_tokens)
        smoothed = partial(compute, label_smoothing=label_smoothing)
    logits = head.forward

    def forward(
        hidden_LD: torch.Tensor, *, targets_L: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        if targets_L is None:
            return logits(hidden_LD)
        asks = torch.is_grad_enabled()
        chosen = smoothed if head.training else compute
        return _SummedLoss.apply(hidden_LD, head.weight, targets_L, chosen, asks)  # pyright: ignore[reportReturnType]

    head.forward = forward  # pyright: ignore[reportAttributeAccessIssue]


def by_chunk(
    hidden_LD: torch.Tensor,
    weight_VD: torch.Tensor,
    *,
    targets_L: torch.Tensor,
    chunk_tokens: int,
    hidden_asks: bool,
    weight_asks: bool,
    label_smoothing: float = 0.0,
) -> Losses:
    """Compute losses and gradients of some tokens at a time; one chunk's logits exist at once.

    Products are made in the operands' dtype, everything between them, and the sum over chunks, in
    fp32 (or the operands' dtype if that is wider). A smoothed target is one-hot for all but
    `label_smoothing`, which every word of the vocabulary has an equal part of.
    """
    wide = torch.float32 if hidden_LD.dtype in _HALVES else hidden_LD.dtype
    num_tokens = len(targets_L)
    losses_L = hidden_LD.new_empty(num_tokens, dtype=wide)
    grad_hidden_LD = torch.empty_like(hidden_LD) if hidden_asks else None
    grad_weight_VD = torch.zeros_like(weight_VD, dtype=wide) if weight_asks else None
    for start in range(0, num_tokens, chunk_tokens):
        rows = slice(start, start + chunk_tokens)
        targets_C = targets_L[rows, None]
        chosen_CV = (hidden_LD[rows] @ weight_VD.t()).to(wide)
        chosen_CV -= chosen_CV.amax(dim=1, keepdim=True)
        own_C1 = chosen_CV.gather(1, targets_C)
        aimed_C1 = own_C1
        if label_smoothing:
            aimed_C1 = own_C1.lerp(chosen_CV.mean(dim=1, keepdim=True), label_smoothing)
        chosen_CV.exp_()
        sums_C1 = chosen_CV.sum(dim=1, keepdim=True)
        losses_L[rows] = (sums_C1.log() - aimed_C1)[:, 0]
        if hidden_asks or weight_asks:
            # The gradient of summed losses by logits: probabilities, less the (smoothed) target.
            chosen_CV /= sums_C1
            if label_smoothing:
                chosen_CV -= label_smoothing / chosen_CV.shape[1]
            chosen_CV.scatter_add_(1, targets_C, torch.full_like(own_C1, label_smoothing - 1.0))
            grad_CV = chosen_CV.to(hidden_LD.dtype)
            if grad_hidden_LD is not None:
                torch.mm(grad_CV, weight_VD, out=grad_hidden_LD[rows])
            if grad_weight_VD is not None:
                _add_product(grad_weight_VD, grad_CV.t(), hidden_LD[rows])
            del grad_CV
        # Or the next chunk is made while this one still lives.
        del chosen_CV
    return Losses(losses_L, grad_hidden_LD, grad_weight_VD)


def _add_product(sum_VD: torch.Tensor, left_VC: torch.Tensor, right_CD: torch.Tensor) -> None:
    """Add a product without rounding it to its operands' dtype, in which fp16 could overflow."""
    if left_VC.dtype == sum_VD.dtype:
        sum_VD.addmm_(left_VC, right_CD)
    elif sum_VD.is_cuda:
        torch.addmm(sum_VD, left_VC, right_CD, out_dtype=sum_VD.dtype, out=sum_VD)
    elif left_VC.dtype == torch.bfloat16:
        sum_VD += left_VC @ right_CD
    else:
        sum_VD.addmm_(left_VC.to(sum_VD.dtype), right_CD.to(sum_VD.dtype))


def _liger(*, label_smoothing: float) -> _Compute:
    """Return Liger's fused kernel in the form of `by_chunk`.

    Raises:
        LayoutError: it is not installed, or labels are to be smoothed.
    """
    if label_smoothing:
        raise LayoutError(
            f"memory.loss is fused, and label_smoothing is {label_smoothing:g}",
            allowed="The losses whole and chunked smooth labels",
            cure="Set plan.layout.memory.loss to chunked, or train.label_smoothing to 0",
        )
    try:
        from liger_kernel.ops.fused_linear_cross_entropy import fused_linear_cross_entropy_forward
    except ImportError as error:
        raise LayoutError(
            f"memory.loss is fused, and Liger's kernels cannot be imported: {error}",
            cure="Install liger-kernel on a machine with a GPU, or set memory.loss to chunked",
        ) from None

    def compute(
        hidden_LD: torch.Tensor,
        weight_VD: torch.Tensor,
        *,
        targets_L: torch.Tensor,
        hidden_asks: bool,
        weight_asks: bool,
    ) -> Losses:
        if not len(targets_L):
            return by_chunk(
                hidden_LD,
                weight_VD,
                targets_L=targets_L,
                chunk_tokens=1,
                hidden_asks=hidden_asks,
                weight_asks=weight_asks,
            )
        # It makes gradients of what requires them. With `none` it returns each token's loss, and
        # the gradients of their sum.
        losses_L, *_, grad_hidden_LD, grad_weight_VD, _ = fused_linear_cross_entropy_forward(
            hidden_LD.detach().requires_grad_(hidden_asks or weight_asks),
            weight_VD.detach().requires_grad_(weight_asks),
            targets_L,
            reduction="none",
            accum_dtype=torch.float32,
        )
        return Losses(losses_L, grad_hidden_LD, grad_weight_VD)

    return compute


class _SummedLoss(torch.autograd.Function):
    """Sum the losses of tokens; their gradients are made in the forward pass, where logits are."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_LD: torch.Tensor,
        weight_VD: torch.Tensor,
        targets_L: torch.Tensor,
        compute: _Compute,
        asks: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sum, and each token's loss without a gradient: [] and [L]."""
        device, dtype = hidden_LD.device.type, hidden_LD.dtype
        if torch.is_autocast_enabled(device) and dtype != torch.float64:
            dtype = torch.get_autocast_dtype(device)
        with torch.autocast(device, enabled=False):
            found = compute(
                hidden_LD.to(dtype),
                weight_VD.to(dtype),
                targets_L=targets_L,
                hidden_asks=asks and ctx.needs_input_grad[0],
                weight_asks=asks and ctx.needs_input_grad[1],
            )
        # Not `save_for_backward`: they are this function's own, and nothing should offload them.
        ctx.gradients = [(found.hidden_LD, hidden_LD.dtype), (found.weight_VD, weight_VD.dtype)]
        ctx.mark_non_differentiable(found.losses_L)
        return found.losses_L.sum(), found.losses_L

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Scale the gradients by that of the sum."""
        assert ctx.gradients is not None, "the gradients were given away by a former backward"
        gradients, ctx.gradients = ctx.gradients, None
        # Scaled before they are rounded: what fp16 cannot hold, a smaller loss scale has to cure.
        scaled = [
            None if each is None else each.mul_(grads[0]).to(dtype) for each, dtype in gradients
        ]
        return (*scaled, None, None, None)
