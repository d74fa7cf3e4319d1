"""Small modules spread over real ranks: what the tests of engines execute on every rank."""

from __future__ import annotations

from functools import partial
from typing import Any

from diptych.core.records import ImageSettings, Layout, ModelSpec, OptimizerSpec, TokenIds
from tests.conftest import TINY_MODEL

TOKENS = TokenIds(num_tokens=500, pad=0, eos=1, image=2, video=3, vision_start=4, vision_end=5)
IMAGE = ImageSettings(patch_px=8, merge=2, temporal_patch=1, min_area_px=256, max_area_px=65536)


def spread_model(
    layout: Layout, *, spec: ModelSpec = TINY_MODEL, world: Any = None, build: Any = None
) -> Any:
    """Build the tiny model with its loss and spread it, as a worker does.

    `build` makes another optimizer than the default.
    """
    from diptych.model import assemble
    from diptych.model.families import units
    from diptych.model.features import freeze
    from diptych.parallel.spread import spread
    from diptych.train.optimizers import build_optimizer
    from diptych.train.step import LossModule
    from tests.runs import _world

    world = world or _world()
    model = assemble.build(spec, tokens=TOKENS, image=IMAGE, seed=5).to(world.device)
    freeze(model, frozen=spec.freeze)
    return spread(
        LossModule(model),
        model=model,
        units=units(model),
        layout=layout,
        world=world,
        build_optimizer=build or partial(build_optimizer, spec=OptimizerSpec()),
    )


def make_inputs(seed: int = 0, *, rank: int | None = None) -> dict[str, Any]:
    """Two rows of 24 tokens, an image of 4 tokens in each; every rank draws its own.

    `rank` draws another one's.
    """
    import torch
    import torch.distributed as dist

    random = torch.Generator().manual_seed(100 * seed + (dist.get_rank() if rank is None else rank))
    ids = torch.randint(10, 400, (2, 24), generator=random)
    ids[:, 2:6] = TOKENS.image
    return {
        "input_ids": ids,
        "labels": torch.where(torch.arange(24) > 10, ids, -100),
        "position_ids": torch.arange(24).expand(3, 2, -1),
        "pixel_values": torch.randn(2 * 16, 3 * 8 * 8, generator=random),
        "grid_thw": torch.tensor([[1, 4, 4]] * 2),
        "source_ids": torch.zeros(2, 24, dtype=torch.int16),
    }


def step(engine: Any, *, seed: int = 0, num_micro_batches: int = 1) -> Any:
    """Train one step of the tiny model; returns the update."""
    for number in range(1, num_micro_batches + 1):
        with engine.micro_batch(is_last=number == num_micro_batches):
            with engine.autocast():
                inputs = make_inputs(seed + number)
                device = next(engine.model.parameters()).device
                loss, _ = engine.module(**{name: x.to(device) for name, x in inputs.items()})
            engine.backward(loss, weight=1 / 50)
    return engine.update(lr=1e-3, max_grad_norm=1.0)


def whole_weights(engine: Any) -> list[Any]:
    """Return every parameter whole, as numpy."""
    from torch.distributed.tensor import DTensor

    engine.tensors()  # Frees what a forward has left gathered.
    weights = [each.detach() for each in engine.model.parameters()]
    return [
        (each.full_tensor() if isinstance(each, DTensor) else each).numpy().copy()
        for each in weights
    ]


def spread_toy(module: Any, *, layout: Layout, lr: float = 0.1) -> Any:
    """Spread a module of no family, with plain SGD, so that a step can be worked by hand."""
    import torch

    from diptych.parallel.native import NativeEngine
    from tests.runs import _world

    return NativeEngine(
        module,
        model=module,
        units=[],
        layout=layout,
        world=_world(),
        build_optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=lr),
    )


def toy_step(engine: Any, inputs: Any, *, lr: float = 0.1) -> Any:
    """Train one step on the sum of the module's outputs, averaged over ranks."""
    import torch.distributed as dist

    with engine.micro_batch(is_last=True):
        with engine.autocast():
            loss = engine.module(inputs).float().sum()
        engine.backward(loss, weight=1 / dist.get_world_size())
    return engine.update(lr=lr, max_grad_norm=1e9)
