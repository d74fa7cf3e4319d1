"""What ranks hold and send in one step, measured and predicted: a layout and a model in.

Random tokens and one small image a row stand for data: neither number depends on them.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from _ranks import run_ranks
from diptych.core.records import (
    HeldBytes,
    ImageSettings,
    Layout,
    ModelSpec,
    OptimizerSpec,
    TokenIds,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from diptych.data.collate import MicroBatch
    from diptych.parallel.traffic import Traffic

SIZES = {
    # Nothing here divides by 2, 3 or 4 everywhere, so that every kind of padding is in it.
    "text": {
        "vocab_size": 510,
        "hidden_size": 36,
        "intermediate_size": 70,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 18,
    },
    "vision": {
        "depth": 2,
        "hidden_size": 44,
        "intermediate_size": 50,
        "num_heads": 1,
        "deepstack_visual_indexes": [0],
        "num_position_embeddings": 49,
        "patch_size": 8,
        "temporal_patch_size": 1,
    },
}
MODEL = ModelSpec(sizes=SIZES)
_TOKENS = TokenIds(num_tokens=500, pad=0, eos=1, image=2, video=3, vision_start=4, vision_end=5)
_IMAGE = ImageSettings(patch_px=8, merge=2, temporal_patch=1, min_area_px=64, max_area_px=65536)
_LENGTH = 24


@dataclass(frozen=True)
class StepBytes:
    """What one rank was found to hold, and to send in its last step."""

    held: HeldBytes
    traffic: Traffic

    @property
    def sent_bytes(self) -> float:
        """Of all collectives."""
        return self.traffic.sent_bytes

    @property
    def by_kind(self) -> dict[str, float]:
        """The same by kind of collective."""
        return {kind: sent for (kind,), sent in self.traffic.by("kind").items()}


@dataclass(frozen=True)
class Cell:
    """A layout to measure; `plain` says that torch's own wrapper is measured beside it."""

    name: str
    layout: Layout
    num_micro_batches: int = 1
    plain: bool = False


@dataclass(frozen=True)
class Found:
    """What every rank of a cell was found to do; `name` says if it was torch's wrapper alone."""

    cell: str
    name: str
    ranks: list[StepBytes]


def _cells() -> list[Cell]:
    copies = _layout(engine="fsdp2", dp=2, shard=2, precision="bf16")
    cells = [Cell("hsdp, 2 x 2 ranks, bf16, accumulated", copies, 2)]
    for size in (2, 3):
        sharded = {"engine": "fsdp2", "shard": size}
        once = {**sharded, "grad_sync": "every", "fsdp": {"gather": "once"}}
        cells += [
            Cell(f"ddp, {size} ranks", _layout(dp=size), plain=True),
            Cell(f"ddp, {size} ranks, accumulated", _layout(dp=size), 2),
            Cell(f"fsdp2, {size} ranks", _layout(**sharded), plain=True),
            Cell(
                f"fsdp2, {size} ranks, bf16, accumulated",
                _layout(**sharded, precision="bf16"),
                2,
            ),
            Cell(f"fsdp2, {size} ranks, gathered once, reduced twice", _layout(**once), 2),
        ]
        if importlib.util.find_spec("deepspeed"):
            cells += [
                Cell(f"zero {stage}, {size} ranks, {precision}, accumulated", layout, 2)
                for stage in (1, 2, 3)
                for precision in ("fp32", "bf16")
                for layout in [_zero(stage, size=size, precision=precision)]
            ]
    return cells


def _zero(stage: int, *, size: int, precision: str) -> Layout:
    return _layout(engine="zero", shard=size, precision=precision, zero={"stage": stage})


def _layout(**fields: Any) -> Layout:
    return Layout.model_validate(fields)


CELLS = _cells()


def measure_cells() -> list[Found]:
    """Measure every cell on ranks of their own, and torch's wrappers where a cell says so."""
    found = []
    for size in sorted({cell.layout.world_size for cell in CELLS}):
        cells = [cell for cell in CELLS if cell.layout.world_size == size]
        by_rank = run_ranks(size, _measure_all, names=[cell.name for cell in cells])
        for number, (cell, name) in enumerate(_turns(cells)):
            found.append(Found(cell.name, name, [rank[number] for rank in by_rank]))
    return found


def _turns(cells: Iterable[Cell]) -> Iterator[tuple[Cell, str]]:
    for cell in cells:
        yield cell, cell.name
        if cell.plain:
            yield cell, f"torch's {cell.name}"


def _measure_all(names: list[str]) -> list[StepBytes]:
    cells = [cell for cell in CELLS if cell.name in names]
    return [
        measure_step(layout=cell.layout, num_micro_batches=cell.num_micro_batches)
        if name == cell.name
        else measure_torch(cell.layout)
        for cell, name in _turns(cells)
    ]


def measure_step(
    *,
    layout: Layout,
    model: ModelSpec = MODEL,
    num_micro_batches: int = 1,
    num_steps: int = 2,
    optimizer: OptimizerSpec = OptimizerSpec(),  # noqa: B008 - frozen
    ema_decay: float | None = None,
) -> StepBytes:
    """Train some steps on this rank of a process group; measure the last one."""
    import torch
    import torch.distributed as dist

    from diptych.model.families import units
    from diptych.parallel.held import measure_held
    from diptych.parallel.mesh import World
    from diptych.parallel.spread import spread
    from diptych.parallel.traffic import count_traffic
    from diptych.train.optimizers import build_optimizer
    from diptych.train.step import LossModule, run_step

    world = World(rank=dist.get_rank(), size=dist.get_world_size(), device=torch.device("cpu"))
    built = _build(model)
    engine = spread(
        LossModule(built, options=layout.memory),
        model=built,
        units=units(built),
        layout=layout,
        world=world,
        build_optimizer=partial(build_optimizer, spec=optimizer, ema_decay=ema_decay),
    )
    engine.module.train()
    steps = []
    with measure_held(engine) as held:
        for _ in range(num_steps):
            batches = [_micro_batch() for _ in range(num_micro_batches)]
            with count_traffic() as traffic:
                run_step(batches, engine=engine, num_label_tokens=100, lr=1e-3, max_grad_norm=1.0)
            steps.append(traffic)
    return StepBytes(held=held.bytes, traffic=steps[-1])


def measure_torch(layout: Layout) -> StepBytes:
    """Do the same with torch's DDP or FSDP2 alone, around transformers' model."""
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    from diptych.model.families import units
    from diptych.parallel import held
    from diptych.parallel.traffic import count_traffic
    from diptych.train.optimizers import build_optimizer
    from diptych.train.step import LossModule, forward

    built = _build(MODEL)
    module = LossModule(built)
    if layout.engine == "ddp":
        module = DistributedDataParallel(module, gradient_as_bucket_view=True)
    else:
        for unit in units(built):
            if unit.is_block:
                fully_shard(unit.module)
        fully_shard(module)
    optimizer = build_optimizer(built, spec=OptimizerSpec())
    engine: Any = SimpleNamespace(module=module, optimizer=optimizer, autocast=nullcontext)
    steps, gradients = [], 0
    for _ in range(2):
        optimizer.zero_grad()
        with count_traffic() as traffic:
            loss, _ = forward(engine, batch=_micro_batch())
            loss.backward()
        steps.append(traffic)
        parameters = held.Storages(held.parameters_of(engine))
        gradients = held.Storages(held.gradients_of(engine), but=[parameters]).num_bytes
        optimizer.step()
    parameters = held.Storages(held.parameters_of(engine))
    states = held.Storages(held.optimizer_tensors_of(engine), but=[parameters])
    found = HeldBytes(
        parameters=parameters.num_bytes, gradients=gradients, optimizer=states.num_bytes
    )
    return StepBytes(held=found, traffic=steps[-1])


def _build(model: ModelSpec) -> PreTrainedModel:
    import torch
    import torch.distributed as dist

    from diptych.model.assemble import build
    from diptych.model.features import freeze

    torch.manual_seed(dist.get_rank())
    built = build(model, tokens=_TOKENS, image=_IMAGE, seed=0)
    freeze(built, frozen=model.freeze)
    return built


def _micro_batch() -> MicroBatch:
    import numpy as np
    import torch

    from diptych.data.collate import MicroBatch

    ids = torch.randint(10, 400, (1, _LENGTH))
    ids[:, 3:7] = 2
    return MicroBatch(
        input_ids_BS=ids,
        labels_BS=ids,
        position_ids_3BS=torch.arange(_LENGTH).expand(3, 1, _LENGTH).contiguous(),
        segment_ids_BS=None,
        source_ids_BS=torch.zeros((1, _LENGTH), dtype=torch.int16),
        pixel_values_PD=torch.randn(16, 3 * 64),
        grid_thw_I3=torch.tensor([[1, 4, 4]]),
        num_rows=1,
        num_samples=1,
        num_label_tokens=_LENGTH - 1,
        num_text_tokens=_LENGTH - 4,
        num_image_tokens=4,
        num_patches=16,
        num_slots=_LENGTH,
        num_samples_by_source=np.array([1]),
        num_label_tokens_by_source=np.array([_LENGTH - 1]),
    )
