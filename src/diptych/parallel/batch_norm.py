"""Batch norm in a tower: refused, with frozen statistics, or over all ranks.

In: a model and a layout. Out: the model's batch norms, changed in place. A batch norm that sees one
micro-batch of one rank computes something else in every layout, so it is never left as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from diptych.core.errors import LayoutError
from diptych.core.records import Layout
from diptych.model.statistics import batch_norms

_NUM_NAMED = 3


def settle(model: nn.Module, *, layout: Layout) -> None:
    """Treat the model's batch norms as the layout says.

    `frozen`: they use their running statistics in training, too, and never update them; their
    weights train. `sync`: each sees a micro-batch of all ranks.

    Raises:
        LayoutError: the model has some and the layout refuses them, or they cannot be treated so.
    """
    found = batch_norms(model)
    if not found:
        return
    if layout.batch_norm == "refuse":
        raise LayoutError(
            f"The model has {_name(found)}, whose statistics would be those of one rank's "
            "micro-batch",
            allowed="plan.layout.batch_norm: frozen keeps the statistics that the weights came "
            "with; sync (GPUs, one micro-batch a step) takes those of all ranks",
            cure="Set it to frozen, or take a model without batch norms",
        )
    if layout.batch_norm == "frozen":
        _refuse_where(
            {name: module for name, module in found.items() if module.running_mean is None},
            why="keeps no running statistics that could be used instead",
        )
        for module in found.values():
            _freeze(module)
        return
    if layout.device != "cuda":
        raise LayoutError(
            "plan.layout.batch_norm is sync, which torch computes on GPUs only",
            cure="Set it to frozen",
        )
    synchronise(model)


def synchronise(model: nn.Module) -> None:
    """Have every batch norm see the micro-batch of all ranks.

    Raises:
        LayoutError: a module's statistics cannot be taken over ranks, or kept in a checkpoint.
    """
    found = batch_norms(model)
    _refuse_where(
        {name: module for name, module in found.items() if isinstance(module, _InstanceNorm)},
        why="is an instance norm, whose running statistics torch does not synchronise",
    )
    _refuse_where(
        {name: module for name, module in found.items() if module.momentum is None},
        why="averages over all batches since the start, which no checkpoint keeps",
    )
    nn.SyncBatchNorm.convert_sync_batchnorm(model)


def _freeze(module: nn.Module) -> None:
    module.eval()
    # Whoever sets the model to train reaches every module through this method.
    module.train = partial(_stay, module)


def _stay(module: nn.Module, mode: bool = True) -> nn.Module:
    return module


def _refuse_where(found: Mapping[str, nn.Module], *, why: str) -> None:
    if found:
        raise LayoutError(
            f"The model has {_name(found)}, which {why}",
            cure="Take a model without it",
        )


def _name(found: Mapping[str, nn.Module]) -> str:
    named = ", ".join(list(found)[:_NUM_NAMED])
    more = f" and {len(found) - _NUM_NAMED} more" if len(found) > _NUM_NAMED else ""
    kinds = "batch norm" if all(isinstance(each, _BatchNorm) for each in found.values()) else "norm"
    return f"{len(found)} {kinds}{'s' if len(found) > 1 else ''} ({named}{more})"
