"""Spread a module over ranks: a module with a loss, its units, a layout in; an `Engine` out.

What changes the units comes first, in this order: batch norm, precision, compile, recompute; then
the engine shards or copies what is there. Where single operators are recomputed that is part of the
graph, so recompute comes before compile.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from diptych.core.records import Layout
from diptych.model.families import Unit
from diptych.parallel import activations, batch_norm, compiled, precision, recompute
from diptych.parallel.engine import BuildOptimizer, Engine, Weights
from diptych.parallel.mesh import World


def spread(
    module: nn.Module,
    *,
    model: nn.Module,
    units: Sequence[Unit],
    layout: Layout,
    world: World,
    build_optimizer: BuildOptimizer,
    weights: Weights | None = None,
) -> Engine:
    """Spread a module over the ranks of a layout.

    Args:
        module: Returns a summed loss; on the rank's device, the same fp32 weights on every rank, or
            on the meta device.
        model: The model in it, whose parameter names are those of checkpoints.
        units: The model's blocks and connector modules.
        layout: Which engine, which axes, which precision, what is recomputed.
        world: This rank's place.
        build_optimizer: Makes the optimizer.
        weights: Fills a module that is on the meta device.

    Raises:
        LayoutError: the layout cannot work with this model or on this machine.
    """
    batch_norm.settle(model, layout=layout)
    precision.apply(model, units=units, layout=layout, device=world.device)
    if layout.memory.recompute == "operators":
        recompute.apply(units, options=layout.memory)
        compiled.apply(units, options=layout.compile)
    else:
        compiled.apply(units, options=layout.compile)
        recompute.apply(units, options=layout.memory)
    activations.apply(module, layout=layout)
    if layout.engine == "zero":
        # DeepSpeed is an extra of the engine, and takes seconds to import.
        from diptych.parallel.zero import ZeroEngine

        return ZeroEngine(
            module,
            model=model,
            layout=layout,
            world=world,
            build_optimizer=build_optimizer,
            weights=weights,
        )
    from diptych.parallel.native import NativeEngine

    return NativeEngine(
        module,
        model=model,
        units=units,
        layout=layout,
        world=world,
        build_optimizer=build_optimizer,
        weights=weights,
    )
