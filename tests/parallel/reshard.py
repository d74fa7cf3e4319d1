"""What ranks do to hold a checkpoint of one layout against what another layout makes of it.

In: layouts by name, a folder. Out: digests of every tensor, gradients, weights, losses. The model
is the tiny one with sizes that nothing divides, a frozen weight, and a mean of the weights.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from diptych.core.records import Layout, OptimizerSpec
from tests.conftest import TINY_MODEL
from tests.parallel.small import IMAGE, TOKENS

NUM_SAVED, NUM_MORE = 3, 2
ROWS, LENGTH, NUM_IMAGE_TOKENS = 12, 24, 4
"""Rows of a global batch: 1, 2, 3 and 4 ranks share them evenly."""
ODD = TINY_MODEL.model_copy(
    update={
        "sizes": {
            "text": {
                **TINY_MODEL.sizes["text"],
                "vocab_size": 511,
                "intermediate_size": 70,
                "hidden_size": 38,
                "head_dim": 18,
            },
            "vision": {
                **TINY_MODEL.sizes["vision"],
                "hidden_size": 44,
                "num_heads": 1,
                "intermediate_size": 50,
                "num_position_embeddings": 49,
            },
        },
        "freeze": ("model.visual.patch_embed.*",),
    }
)
SPEC = OptimizerSpec(lr=2e-4, eps=1e-5)
"""At an eps of 1e-8 AdamW moves weights whose gradient is zero but for rounding by the whole rate,
in a direction that is each layout's own."""
REFERENCE = "one process"


def _layout(engine: str, **fields: Any) -> Layout:
    return Layout.model_validate({"engine": engine, "micro_batch": 1, **fields})


def _zero(stage: int, *, ranks: int, **fields: Any) -> Layout:
    options = fields.pop("options", {})
    return _layout("zero", shard=ranks, zero={"stage": stage, **options}, **fields)


_ON_HOST = {"optimizer": {"to": "cpu", "adam": "torch"}}
LAYOUTS: dict[str, Layout] = {
    "one process": Layout(),
    "ddp, 2 ranks": _layout("ddp", dp=2),
    "ddp, 4 ranks": _layout("ddp", dp=4),
    "fsdp2, 2 ranks": _layout("fsdp2", shard=2),
    "fsdp2, 3 ranks": _layout("fsdp2", shard=3),
    "fsdp2, 4 ranks": _layout("fsdp2", shard=4),
    "fsdp2 on the host, 2 ranks": _layout(
        "fsdp2", shard=2, fsdp={"offload": True, "pin_memory": False}
    ),
    "hsdp, 2 copies of 2 ranks": _layout("fsdp2", dp=2, shard=2),
    "zero 1, 1 rank": _zero(1, ranks=1),
    "zero 1, 2 ranks": _zero(1, ranks=2),
    "zero 1, 4 ranks": _zero(1, ranks=4),
    "zero 2, 2 ranks": _zero(2, ranks=2),
    "zero 2, 4 ranks": _zero(2, ranks=4),
    "zero 2 on the host, 2 ranks": _zero(2, ranks=2, options=_ON_HOST),
    "zero 3, 1 rank": _zero(3, ranks=1),
    "zero 3, 2 ranks": _zero(3, ranks=2),
    "zero 3, 4 ranks": _zero(3, ranks=4),
    "zero 3 on the host, 3 ranks": _zero(
        3, ranks=3, options={**_ON_HOST, "parameters": {"to": "cpu"}}
    ),
}
"""Every way to lay fp32 weights and moments out."""

_FP16 = {"precision": "fp16", "mixed_precision": {"loss_scale": {"growth_interval": 2}}}
LOW: dict[str, Layout] = {
    "zero 1, 2 ranks, bf16": _zero(1, ranks=2, precision="bf16"),
    "fsdp2, 2 ranks, bf16": _layout("fsdp2", shard=2, precision="bf16"),
    "zero 3, 2 ranks, bf16": _zero(3, ranks=2, precision="bf16"),
    "ddp, 2 ranks, fp16": _layout("ddp", dp=2, **_FP16),
    "zero 2, 2 ranks, fp16": _zero(2, ranks=2, **_FP16),
}
"""Layouts that compute in lower precision; the scale of fp16 has grown when they are saved."""


def _inputs(number: int, *, world: Any) -> dict[str, Any]:
    """This rank's rows of a global batch, each with an image."""
    import torch

    random = torch.Generator().manual_seed(number)
    ids = torch.randint(10, 400, (ROWS, LENGTH), generator=random)
    ids[:, 2 : 2 + NUM_IMAGE_TOKENS] = TOKENS.image
    pixels = torch.randn(ROWS, 4 * NUM_IMAGE_TOKENS, 3 * IMAGE.patch_px**2, generator=random)
    mine = slice(world.rank * ROWS // world.size, (world.rank + 1) * ROWS // world.size)
    ids = ids[mine]
    return {
        "input_ids": ids,
        "labels": torch.where(torch.arange(LENGTH) > LENGTH // 2, ids, -100),
        "position_ids": torch.arange(LENGTH).expand(3, len(ids), -1),
        "pixel_values": pixels[mine].flatten(0, 1),
        "grid_thw": torch.tensor([[1, 4, 4]] * len(ids)),
        "source_ids": torch.zeros(len(ids), LENGTH, dtype=torch.int16),
    }


def _world(layout: Layout) -> Any:
    import torch

    from tests import runs

    return replace(runs._world(), device=torch.device(layout.device))


def _engine(layout: Layout, *, world: Any) -> Any:
    from diptych.train.optimizers import build_optimizer
    from tests.parallel.small import spread_model

    build = partial(build_optimizer, spec=SPEC, ema_decay=0.9)
    engine = spread_model(layout, spec=ODD, build=build, world=world)
    engine.module.train()
    return engine


def _step(engine: Any, *, number: int, world: Any, look: Any = lambda: None) -> float:
    """Train a step; `look` at the gradient before the update. Returns the mean loss."""
    from diptych.parallel.mesh import gather_numbers

    inputs = {name: each.to(world.device) for name, each in _inputs(number, world=world).items()}
    num_labels = ROWS * (LENGTH - LENGTH // 2 - 1)
    with engine.micro_batch(is_last=True):
        with engine.autocast():
            loss, _ = engine.module(**inputs)
        engine.backward(loss, weight=1 / num_labels)
    look()
    assert engine.update(lr=SPEC.lr, max_grad_norm=1.0).applied
    return gather_numbers([float(loss.detach())], world=world).sum() / num_labels


def _whole(tensors: Any) -> dict[str, Any]:
    """Put every tensor together out of the ranks' parts, by no code of an engine's."""
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor

    mine = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            (axis,) = [axis for axis, each in enumerate(tensor.placements) if each.is_shard()]
            place = tensor.device_mesh.get_coordinate()[axis]
            mine[name] = place, tensor.to_local().cpu().numpy()
        else:
            mine[name] = 0, tensor.detach().cpu().numpy()
    everyone: list[Any] = [None] * dist.get_world_size()
    # One for all tensors: every gather waits for every rank.
    dist.all_gather_object(everyone, mine)
    found = {}
    for name, tensor in tensors.items():
        parts: dict[int, np.ndarray] = {}
        for place, part in (theirs[name] for theirs in everyone):
            # Copies of a part hold the same bits.
            assert np.array_equal(parts.setdefault(place, part), part), name
        whole = [parts[place] for place in sorted(parts)]
        found[name] = np.concatenate(whole) if len(whole) > 1 else whole[0].copy()
        assert found[name].shape == tuple(tensor.shape), name
    return found


@dataclass(frozen=True)
class State:
    """Every tensor's digest, and the weights as one vector."""

    digests: dict[str, str]
    weights: np.ndarray


@dataclass(frozen=True)
class Went:
    """What a layout has once a checkpoint is saved or loaded, and how it goes on from there."""

    begun: State
    engine: dict[str, Any]
    gradient: np.ndarray
    losses: list[float]
    ended: State


def _state(engine: Any) -> State:
    tensors = _whole(engine.tensors())
    weights = [each.ravel() for name, each in sorted(tensors.items()) if name.startswith("model.")]
    return State(
        digests={
            name: hashlib.sha256(f"{each.shape}".encode() + each.tobytes()).hexdigest()
            for name, each in tensors.items()
        },
        weights=np.concatenate(weights).astype(np.float64),
    )


def _go_on(engine: Any, *, world: Any) -> Went:
    from tests.runs import whole_gradients

    begun, state, gradient = _state(engine), engine.state(), []
    losses = [
        _step(
            engine,
            number=NUM_SAVED,
            world=world,
            look=lambda: gradient.extend(whole_gradients(engine)),
        )
    ]
    losses += [_step(engine, number=NUM_SAVED + more, world=world) for more in range(1, NUM_MORE)]
    return Went(begun, state, np.concatenate(gradient), losses, _state(engine))


def save(layout: Layout, *, folder: Path) -> Went | None:
    """Train, save, and go on; every rank calls it, the first one says what was seen."""
    from diptych.parallel import storage

    world = _world(layout)
    engine = _engine(layout, world=world)
    for number in range(NUM_SAVED):
        _step(engine, number=number, world=world)
    storage.save(folder, tensors=engine.tensors(), state={"engine": engine.state()}, world=world)
    found = _go_on(engine, world=world)
    engine.close()
    return found if world.is_first else None


def train_through() -> Went:
    """Train the single process that nothing ends."""
    world = _world(LAYOUTS[REFERENCE])
    engine = _engine(LAYOUTS[REFERENCE], world=world)
    for number in range(NUM_SAVED):
        _step(engine, number=number, world=world)
    return _go_on(engine, world=world)


def relative(found: np.ndarray, expected: np.ndarray) -> float:
    """Return the difference's share of a whole vector (L2)."""
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def in_parts(folders: dict[str, Path], *, at_once: int = 6) -> Iterator[dict[str, Path]]:
    """Yield so many checkpoints at once: ranks have to answer within their time limit."""
    names = list(folders)
    for at in range(0, len(names), at_once):
        yield {name: folders[name] for name in names[at : at + at_once]}


def load(layout: Layout, *, folders: dict[str, Path]) -> dict[str, Went] | None:
    """Load checkpoints one after another into an engine that is elsewhere, and go on from each."""
    from diptych.parallel import storage

    world = _world(layout)
    engine = _engine(layout, world=world)
    found = {}
    for number, (name, folder) in enumerate(folders.items()):
        # What is not loaded shows: steps of other data lie between.
        _step(engine, number=100 + number, world=world)
        tensors = engine.tensors()
        storage.load(folder, tensors=tensors)
        engine.take(tensors, num_updates=NUM_SAVED)
        engine.restore(storage.read_state(folder)["engine"])
        found[name] = _go_on(engine, world=world)
    engine.close()
    return found if world.is_first else None
