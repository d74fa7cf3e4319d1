"""Which part of a model computes in which dtype.

In: a model, its units, a layout. Out: forwards changed in place, and for the engine an autocast
context (replicated weights) or a policy for each part (sharded weights). Master weights stay fp32.

Both kinds of engine see the same pieces: the units, and the modules that hold the rest of the
parameters. Under autocast a piece of another dtype opens a context of its own; sharded, it is a
group of its own that is gathered in its dtype. What enters a piece is cast at its border, so towers
of different dtypes fit together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import wraps
from typing import Any, get_args

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from diptych.core.errors import LayoutError
from diptych.core.records import Dtype, Layout, TowerName
from diptych.model.attention import kernels
from diptych.model.families import Unit, rest
from diptych.parallel import fp8

DTYPES: dict[Dtype, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
_HALVES = (torch.bfloat16, torch.float16)
_FIRST_WITH_BF16 = (8, 0)
"""The compute capability (Ampere) from which CUDA devices compute bf16."""


@dataclass(frozen=True)
class Piece:
    """A part of a model that computes in one dtype: a unit, or a module outside of all units."""

    name: str
    module: nn.Module
    tower: TowerName


def apply(model: nn.Module, *, units: Sequence[Unit], layout: Layout, device: torch.device) -> None:
    """Have parts of a model compute in the dtypes that the layout gives them.

    Raises:
        LayoutError: the device does not compute in one of them.
    """
    check_device(layout, device=device)
    options = layout.mixed_precision
    fp8.apply(units, towers=options.fp8, device=device)
    if "attention" in options.keep_fp32:
        kernels.keep_fp32(model)
    if layout.engine == "zero":
        return
    if "norms" in options.keep_fp32:
        for norm in norms(model):
            norm.forward = _upcast(norm.forward, kind=device.type)
    if is_mixed(layout):
        for piece in pieces(model, units=units):
            _enter(piece, layout=layout)


def check_device(layout: Layout, *, device: torch.device) -> None:
    """Refuse bf16 on a GPU that has none; a CPU computes it in software.

    Raises:
        LayoutError: the GPU is older than Ampere.
    """
    used = {tower_dtype(layout, tower=tower) for tower in get_args(TowerName)}
    if device.type == "cuda" and "bf16" in used:
        found = torch.cuda.get_device_capability(device)
        if found < _FIRST_WITH_BF16:
            raise LayoutError(
                f"{torch.cuda.get_device_name(device)} (compute capability {found[0]}.{found[1]}) "
                "has no bf16",
                allowed="fp16 or fp32 on it; bf16 from capability 8.0 on",
                cure="Set plan.layout.precision to fp16",
            )


def tower_dtype(layout: Layout, *, tower: TowerName) -> Dtype:
    """Name the dtype that a tower computes in."""
    return layout.mixed_precision.towers.get(tower, layout.precision)


def base_dtype(layout: Layout) -> Dtype:
    """Name the dtype of what is in no piece, and of the root's group: the language model's."""
    return tower_dtype(layout, tower="language")


def is_mixed(layout: Layout) -> bool:
    """Whether towers compute in different dtypes."""
    return len({tower_dtype(layout, tower=tower) for tower in get_args(TowerName)}) > 1


def pieces(model: nn.Module, *, units: Sequence[Unit]) -> Iterator[Piece]:
    """List the units, then the modules that hold the parameters outside of them."""
    for unit in units:
        yield Piece(name=unit.name, module=unit.module, tower=unit.tower)
    for name, tower in rest(model, units=units).items():
        yield Piece(name=name, module=model.get_submodule(name), tower=tower)


def norms(module: nn.Module) -> list[nn.Module]:
    """List a module's normalisations, torch's and hand-written ones."""
    return [each for each in module.modules() if is_norm(each)]


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a normalisation, by torch's classes or by its name."""
    known = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
    return isinstance(module, known) or type(module).__name__.endswith("Norm")


def autocast(layout: Layout) -> Callable[[], AbstractContextManager[Any]]:
    """Return the context of forward passes; FSDP2 casts by its own policy instead."""
    dtype = base_dtype(layout)
    if layout.engine != "ddp" or dtype == "fp32":
        return nullcontext
    return lambda: torch.autocast(layout.device, dtype=DTYPES[dtype])


def policy(layout: Layout, *, dtype: Dtype, casts_inputs: bool = False) -> MixedPrecisionPolicy:
    """Return FSDP2's policy for a group that is gathered in a dtype.

    Inputs are cast at pieces' borders, and not by FSDP, which would round rotary tables too.
    """
    reduce = layout.mixed_precision.reduce
    if dtype == "fp32" and reduce == "fp32":
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(
        param_dtype=None if dtype == "fp32" else DTYPES[dtype],
        reduce_dtype=DTYPES[reduce],
        cast_forward_inputs=casts_inputs,
    )


def _enter(piece: Piece, *, layout: Layout) -> None:
    """Have a piece cast what enters it, and compute in its tower's dtype."""
    name = tower_dtype(layout, tower=piece.tower)
    dtype, forward = DTYPES[name], piece.module.forward
    # Autocast casts for every operator; what computes in fp32 beside it has to cast by itself.
    if layout.engine == "fsdp2" or name == "fp32":
        forward = _cast_inputs(forward, dtype=dtype)
    if layout.engine == "ddp" and name != base_dtype(layout):
        forward = _autocast(forward, kind=layout.device, dtype=dtype)
    piece.module.forward = forward


def _cast_inputs(forward: Callable[..., Any], *, dtype: torch.dtype) -> Callable[..., Any]:
    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        cast = (
            each.to(dtype) if isinstance(each, torch.Tensor) and each.is_floating_point() else each
            for each in args
        )
        return forward(*cast, **kwargs)

    return run


def _autocast(forward: Callable[..., Any], *, kind: str, dtype: torch.dtype) -> Callable[..., Any]:
    enabled = dtype in _HALVES

    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(kind, dtype=dtype if enabled else None, enabled=enabled):
            return forward(*args, **kwargs)

    return run


def _upcast(forward: Callable[..., Any], *, kind: str) -> Callable[..., Any]:
    """Compute in fp32 and return the dtype that came in."""

    @wraps(forward)
    def run(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        with torch.autocast(kind, enabled=False):
            wide = hidden.float() if hidden.dtype in _HALVES else hidden
            return forward(wide, *args, **kwargs).to(hidden.dtype)

    return run
