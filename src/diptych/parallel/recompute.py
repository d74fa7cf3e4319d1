"""Compute activations again in the backward pass instead of holding them.

In: a model's units and the memory options. Out: the chosen units' forwards, changed in place. The
modules stay, so names do, and what hooks into a module's call (FSDP2, ZeRO) stays outside.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from diptych.core.errors import LayoutError
from diptych.core.records import MemoryOptions
from diptych.model.families import Unit

_aten = torch.ops.aten
_KEPT_NAMES = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "linear",
    "convolution",
    "_scaled_mm",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)
_KEPT = frozenset(getattr(_aten, name).default for name in _KEPT_NAMES if hasattr(_aten, name))
"""What `operators` keeps the results of: most of the arithmetic."""


def apply(units: Sequence[Unit], *, options: MemoryOptions) -> None:
    """Have the chosen units recompute while they train.

    Args:
        units: The model's blocks and connector modules.
        options: What is recomputed, and of which units.

    Raises:
        LayoutError: a chosen unit has a batch norm, which would count each batch twice.
    """
    if options.recompute == "none":
        return
    for unit in units:
        if is_chosen(unit, options=options):
            _refuse_batch_norm(unit)
            unit.module.forward = _recomputed(unit.module, what=options.recompute)


def is_chosen(unit: Unit, *, options: MemoryOptions) -> bool:
    """Say whether a unit recomputes: of every k blocks of a tower the first, from depth 0."""
    if options.recompute == "none":
        return False
    if not unit.is_block:
        return options.recompute_connector
    every = options.vision_every if unit.tower == "vision" else options.language_every
    return every > 0 and unit.depth % every == 0


def _recomputed(module: nn.Module, *, what: Literal["blocks", "operators"]) -> Callable[..., Any]:
    forward = module.forward
    options: dict[str, Any] = {}
    if what == "operators":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
        # What offloads saved tensors then sees those that are kept, too; older torch cannot.
        if "respect_saved_tensors_hooks" in inspect.signature(checkpoint).parameters:
            options["respect_saved_tensors_hooks"] = True

    @wraps(forward)
    def recomputing(*args: Any, **kwargs: Any) -> Any:
        if not (module.training and torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        # The random state is kept as well, so that dropout would draw the same again.
        return checkpoint(forward, *args, use_reentrant=False, **options, **kwargs)

    return recomputing


def _policy(
    context: SelectiveCheckpointContext, operator: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    if operator in _KEPT:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def _refuse_batch_norm(unit: Unit) -> None:
    for name, module in unit.module.named_modules():
        if isinstance(module, _BatchNorm) and module.training and module.track_running_stats:
            raise LayoutError(
                f"{unit.name} has a batch norm ({name}), and recomputing it would count every "
                "batch twice in its running statistics",
                cure="Set plan.layout.batch_norm to frozen, or memory.recompute to none",
            )
