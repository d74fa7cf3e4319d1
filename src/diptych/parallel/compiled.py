"""`torch.compile`, block by block: units in, their forwards compiled in place.

A tower's blocks share their code, so a graph made for one of them serves all; graphs are counted
and bounded by tower. Vision attention runs uncompiled between two graphs: it splits patches by
image, and how many each image has is data. What a block computes is unknown here.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._guards import CompileContext

from diptych.core.errors import LayoutError
from diptych.core.records import CompileOptions
from diptych.model.families import Unit

_LOG = logging.getLogger(__name__)
_SPLITS_BY_DATA = ("cu_seqlens",)
"""Arguments whose length is the number of images, which no padding makes constant."""

_towers: list[_Tower] = []


def apply(units: Sequence[Unit], *, options: CompileOptions, backend: str = "inductor") -> None:
    """Compile the blocks of the chosen towers; the first forward of each shape takes a while.

    Args:
        units: The model's blocks and connector modules.
        options: Which towers, for which shapes, and how often.
        backend: What makes code of a graph.

    Raises:
        LayoutError: there is no C++ compiler, which inductor needs.
    """
    chosen = [unit for unit in units if unit.is_block and unit.tower in options.blocks]
    if chosen and backend == "inductor":
        _check_compiler()
    towers = {name: _Tower(name, options=options, backend=backend) for name in options.blocks}
    for unit in chosen:
        if unit.tower == "vision":
            _keep_attention(unit.module)
        unit.module.forward = towers[unit.tower].compile(unit.module)
    _towers.extend(towers.values())


def num_recompiles() -> int | None:
    """Count the recompiles of this process; None where nothing was compiled.

    A graph of code that has one already is a recompile: for another shape, or without gradient.
    """
    return sum(tower.num_recompiles for tower in _towers) if _towers else None


class _Tower:
    """The graphs of one tower's blocks.

    Dynamo keeps graphs by code object, and would run all of a process' compiled code uncompiled
    past one global limit; here each tower has its own.
    """

    def __init__(self, name: str, *, options: CompileOptions, backend: str) -> None:
        self._name = name
        self._limit = 1 + options.max_recompiles
        self._is_static = options.shapes == "static"
        self._backend = torch._dynamo.lookup_backend(backend)
        self._graphs: dict[int, set[int]] = {}
        self._run = torch.compile(
            _run,
            dynamic=not self._is_static,
            backend=self._make_code,
            **_bound(self._limit),
        )

    @property
    def num_recompiles(self) -> int:
        """Count the graphs of every code object but its first."""
        return sum(len(graphs) - 1 for graphs in self._graphs.values())

    def compile(self, block: nn.Module) -> Callable[..., Any]:
        """Return a block's forward, compiled."""
        return partial(self._forward, block.forward)

    def _forward(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._is_static:
            for name in _SPLITS_BY_DATA:
                if isinstance(lengths := kwargs.get(name), torch.Tensor):
                    torch._dynamo.mark_dynamic(lengths, 0)
        return self._run(forward, *args, **kwargs)

    def _make_code(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        # One compile may hand over its graph more than once, under the same id.
        compile_id = CompileContext.current_compile_id()
        assert compile_id is not None, "dynamo compiles"
        assert compile_id.frame_id is not None, "dynamo compiles"
        graphs = self._graphs.setdefault(compile_id.frame_id, set())
        graphs.add(compile_id.frame_compile_id or 0)
        if len(graphs) == self._limit:
            _LOG.warning(
                "the blocks of the %s tower have been compiled %d times, the most that "
                "plan.layout.compile.max_recompiles allows: what needs another graph from now on "
                "runs uncompiled; pad to fewer shapes (memory.token_multiple, patch_multiple), or "
                "set compile.shapes to dynamic",
                self._name,
                self._limit,
            )
        return self._backend(graph, inputs)


def _keep_attention(block: nn.Module) -> None:
    """Leave a vision block's attention out of its graphs."""
    for name, part in block.named_children():
        if name.startswith("attn"):
            part.forward = torch.compiler.disable(part.forward)


def _run(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Be the code that dynamo sees first: the same for every block of a tower."""
    return forward(*args, **kwargs)


def _bound(limit: int) -> dict[str, Any]:
    """Bound what one call compiles, apart from others; older torch has one bound for all, 8."""
    if "isolate_recompiles" not in inspect.signature(torch.compile).parameters:
        return {}
    return {"recompile_limit": limit, "isolate_recompiles": True}


def _check_compiler() -> None:
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        raise LayoutError(
            "plan.layout.compile needs a C++ compiler, and none is found",
            allowed="torch looks for g++, or for what the variable CXX names",
            cure="Install g++, or set compile.blocks to []",
        ) from None
