"""The matrix of promise 2: axes and their values, which combinations can run, which are tried.

In: nothing. Out: cells, each a layout with the model and schedule that it trains. Knows no torch.

Two sets of cells:

- `make_pairs`: every two values of two axes meet in one cell at least (`make test`).
- `LAYOUTS` x `COLUMNS`: every layout with every precision and every memory setting, written to
  `docs/same_loss.md` (`make test-exhaustive`). `make test-slow` tries a sample of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import combinations, product
from typing import Any

from diptych.core.records import (
    Cluster,
    ContrastSpec,
    Device,
    Layout,
    ModelShape,
    ModelSpec,
    ScheduleSpec,
)
from diptych.model.inspect import inspect
from diptych.plan.refusals import Setting, refusal
from tests.conftest import TINY_MODEL, TINY_PACKS, TINY_SCHEDULE

MODELS: dict[str, ModelSpec] = {
    "tied": TINY_MODEL,
    "untied": TINY_MODEL.model_copy(update={"tie_word_embeddings": False}),
    "frozen vision": TINY_MODEL.model_copy(update={"freeze": ("vision",)}),
}
SCHEDULES: dict[str, ScheduleSpec] = {
    "bucket": TINY_SCHEDULE,
    "pack": TINY_PACKS,
    # Samples of a row are told apart, too.
    "pack, contrast": TINY_PACKS,
}
CONTRASTS = {"pack, contrast": ContrastSpec(weight=0.5)}

# A scale at which no step of the tiny model overflows: a skipped step would be another trajectory.
_FP16 = {"mixed_precision": {"loss_scale": {"initial": 1024.0}}}

AXES: dict[str, dict[str, dict[str, Any]]] = {
    "engine": {
        "ddp": {"engine": "ddp"},
        "fsdp2 twice": {"engine": "fsdp2", "fsdp": {"gather": "twice"}},
        "fsdp2 once": {"engine": "fsdp2", "fsdp": {"gather": "once"}},
        "fsdp2 offloaded": {"engine": "fsdp2", "fsdp": {"offload": True, "pin_memory": False}},
        "zero 1": {"engine": "zero", "zero": {"stage": 1}},
        "zero 2": {"engine": "zero", "zero": {"stage": 2}},
        "zero 3": {"engine": "zero", "zero": {"stage": 3}},
        "zero 2 offloaded": {
            "engine": "zero",
            "zero": {"stage": 2, "optimizer": {"to": "cpu", "adam": "torch"}},
        },
    },
    "ranks": {"2 ranks": {}, "1 rank": {}, "3 ranks": {}, "2 x 2 ranks": {}},
    "micro-batches": {
        "one": {},
        "several": {"grad_sync": "last"},
        "several, synced each": {"grad_sync": "every"},
    },
    "precision": {
        "fp32": {},
        "bf16": {"precision": "bf16"},
        "fp16": {"precision": "fp16", **_FP16},
        "bf16, vision fp32": {
            "precision": "bf16",
            "mixed_precision": {"towers": {"vision": "fp32"}},
        },
        "bf16, norms fp32": {"precision": "bf16", "mixed_precision": {"keep_fp32": ["norms"]}},
        "bf16, attention fp32": {
            "precision": "bf16",
            "mixed_precision": {"keep_fp32": ["attention"]},
        },
    },
    "recompute": {
        "nothing": {},
        "blocks": {"memory": {"recompute": "blocks"}},
        "every second block": {
            "memory": {"recompute": "blocks", "vision_every": 2, "language_every": 2}
        },
        "operators": {"memory": {"recompute": "operators"}},
    },
    "activations": {
        "on the device": {},
        "on the host": {"memory": {"offload_activations": True}},
    },
    "loss": {
        "whole": {},
        # A few label tokens a chunk, so that a micro-batch has several.
        "chunked": {"memory": {"loss": "chunked", "loss_chunk_tokens": 8}},
    },
    "shapes": {
        "as they come": {},
        "few": {"memory": {"token_multiple": 32, "patch_multiple": 64}},
        "few, memory reused": {
            "memory": {"token_multiple": 32, "patch_multiple": 64, "reuse_buffers": True}
        },
    },
    "model": {name: {} for name in MODELS},
    "schedule": {name: {} for name in SCHEDULES},
}
"""Every axis' values, the plainest first, with the fields of the layout that they set."""

Pair = tuple[tuple[str, str], tuple[str, str]]
"""Two axes, each with a value, in the order of `AXES`."""
_PLAIN = {axis: next(iter(values)) for axis, values in AXES.items()}


@dataclass(frozen=True)
class Cell:
    """One combination: the layout that runs, and what it trains."""

    name: str
    layout: Layout
    model: str
    schedule: str

    @property
    def refused(self) -> str | None:
        """Why the product does not start it, None if it does."""
        return _refusal(self.layout, model=self.model, schedule=self.schedule)

    @property
    def reference(self) -> Layout:
        """The single process in fp32, which it has to follow."""
        return Layout(micro_batch=SCHEDULES[self.schedule].global_batch)

    @property
    def rounds(self) -> bool:
        """Whether some part computes in fewer bits than fp32."""
        return self.layout.precision != "fp32"


def make_cell(name: str, **chosen: str) -> Cell:
    """Combine one value of each axis; an axis that is not named has its plainest value."""
    values = {**_PLAIN, **chosen}
    fields: dict[str, Any] = {}
    for axis, value in values.items():
        _merge(fields, AXES[axis][value])
    schedule = SCHEDULES[values["schedule"]]
    dp, shard = _axes(values["ranks"], engine=fields["engine"])
    fields |= {
        "dp": dp,
        "shard": shard,
        "micro_batch": _micro_batch(
            schedule, world_size=dp * shard, one=values["micro-batches"] == "one"
        ),
    }
    return Cell(
        name=name,
        layout=Layout.model_validate(fields),
        model=values["model"],
        schedule=values["schedule"],
    )


def _axes(ranks: str, *, engine: str) -> tuple[int, int]:
    """Return dp and shard."""
    if ranks == "2 x 2 ranks":
        return {"ddp": (4, 1), "fsdp2": (2, 2), "zero": (1, 4)}[engine]
    world_size = int(ranks.split()[0])
    return (world_size, 1) if engine == "ddp" else (1, world_size)


def _micro_batch(schedule: ScheduleSpec, *, world_size: int, one: bool) -> int:
    """Return the rows of a micro-batch: all of a rank's share, or the least that there can be."""
    if not one:
        return 2 if world_size <= 2 else 1
    share = -(-schedule.global_batch // world_size)
    # Groups of four rows stay together: three ranks cannot share eight rows, so one has none.
    return 4 if schedule.mode == "bucket" and share == 3 else share


def _merge(fields: dict[str, Any], more: Mapping[str, Any]) -> None:
    for name, value in more.items():
        if isinstance(value, Mapping):
            _merge(fields.setdefault(name, {}), value)
        else:
            fields[name] = value


def _refusal(layout: Layout, *, model: str, schedule: str) -> str | None:
    spec = SCHEDULES[schedule]
    units = -(-spec.global_batch // layout.micro_batch)
    setting = Setting(
        model_shape=_shape(model),
        cluster=_CLUSTER,
        num_micro_batches=-(-units // (layout.dp * layout.shard)),
        group=spec.group if spec.mode == "bucket" else 1,
        global_batch=spec.global_batch,
    )
    return refusal(layout, setting=setting)


_CLUSTER = Cluster(
    num_nodes=1,
    num_devices_per_node=1,
    device=Device(kind="cpu", name="CPU", memory_bytes=8 * 1024**3, flops_per_s={}),
    num_cores_per_node=4,
    host_memory_bytes=8 * 1024**3,
)


@cache
def _shape(model: str) -> ModelShape:
    return inspect(MODELS[model])


def make_pairs() -> list[Cell]:
    """Choose few cells in which every two values meet that can; the same ones every time.

    Each cell begins with a pair that has not met yet, and takes of every further axis the value
    that brings most new pairs. The libraries for this give up early where combinations are refused.
    """
    missing = dict.fromkeys(pairs_that_can_run())
    cells = []
    while missing:
        chosen = dict(next(iter(missing)))
        for axis in AXES:
            if axis not in chosen:
                chosen[axis] = max(
                    (value for value in AXES[axis] if _can_run({**chosen, axis: value})),
                    key=lambda value: sum(pair in missing for pair in _pairs(chosen, axis, value)),
                )
        for pair in combinations(((axis, chosen[axis]) for axis in AXES), 2):
            missing.pop(pair, None)
        cells.append(make_cell(" | ".join(chosen[axis] for axis in AXES), **chosen))
    return cells


def pairs_that_can_run() -> Iterator[Pair]:
    """Yield every two values of two axes that run together, all else at its plainest."""
    for (first, values), (second, others) in combinations(AXES.items(), 2):
        for value, other in product(values, others):
            if _can_run({first: value, second: other}):
                yield (first, value), (second, other)


def _pairs(chosen: dict[str, str], axis: str, value: str) -> Iterator[Pair]:
    """Yield the pairs that a value makes with those that are chosen, in the order of the axes."""
    place = list(AXES).index
    for other, its_value in chosen.items():
        pair = ((other, its_value), (axis, value))
        yield pair if place(other) < place(axis) else pair[::-1]


def _can_run(chosen: dict[str, str]) -> bool:
    return make_cell("", **chosen).refused is None


_TWO = {"ranks": "2 ranks"}
_SEVERAL = {"ranks": "2 ranks", "micro-batches": "several"}
_EACH = {"ranks": "2 ranks", "micro-batches": "several, synced each"}
_THREE = {"ranks": "3 ranks", "micro-batches": "several"}
_FOUR = {"ranks": "2 x 2 ranks"}

LAYOUTS: dict[str, dict[str, str]] = {
    "one process": {"engine": "ddp", "ranks": "1 rank"},
    "one process, accumulated": {
        "engine": "ddp",
        "ranks": "1 rank",
        "micro-batches": "several",
    },
    "ddp, 2 ranks": {"engine": "ddp", **_TWO},
    "ddp, 2 ranks, accumulated": {"engine": "ddp", **_SEVERAL},
    "ddp, 2 ranks, synced each": {"engine": "ddp", **_EACH},
    "ddp, 3 ranks, accumulated": {"engine": "ddp", **_THREE},
    "ddp, 4 ranks": {"engine": "ddp", **_FOUR},
    "fsdp2 gathered twice, 2 ranks": {"engine": "fsdp2 twice", **_TWO},
    "fsdp2 gathered twice, 2 ranks, accumulated": {"engine": "fsdp2 twice", **_SEVERAL},
    "fsdp2 gathered twice, 2 ranks, synced each": {"engine": "fsdp2 twice", **_EACH},
    "fsdp2 gathered twice, 3 ranks, accumulated": {"engine": "fsdp2 twice", **_THREE},
    "fsdp2 gathered twice, 2 copies of 2 ranks": {"engine": "fsdp2 twice", **_FOUR},
    "fsdp2 gathered once, 2 ranks": {"engine": "fsdp2 once", **_TWO},
    "fsdp2 gathered once, 2 ranks, accumulated": {"engine": "fsdp2 once", **_SEVERAL},
    "fsdp2 offloaded, 2 ranks": {"engine": "fsdp2 offloaded", **_TWO},
    "zero 1, 2 ranks": {"engine": "zero 1", **_TWO},
    "zero 1, 2 ranks, accumulated": {"engine": "zero 1", **_SEVERAL},
    "zero 2, 2 ranks": {"engine": "zero 2", **_TWO},
    "zero 2, 2 ranks, accumulated": {"engine": "zero 2", **_SEVERAL},
    "zero 2, optimizer on the host, 2 ranks": {"engine": "zero 2 offloaded", **_TWO},
    "zero 3, 2 ranks": {"engine": "zero 3", **_TWO},
    "zero 3, 2 ranks, accumulated": {"engine": "zero 3", **_SEVERAL},
    "zero 3, 3 ranks, accumulated": {"engine": "zero 3", **_THREE},
}
"""Rows of the table."""

COLUMNS: dict[str, dict[str, str]] = {
    "fp32": {},
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16"},
    "bf16, vision fp32": {"precision": "bf16, vision fp32"},
    "bf16, norms fp32": {"precision": "bf16, norms fp32"},
    "bf16, attention fp32": {"precision": "bf16, attention fp32"},
    "recompute blocks": {"recompute": "blocks"},
    "recompute every 2nd block": {"recompute": "every second block"},
    "recompute operators": {"recompute": "operators"},
    "activations on the host": {"activations": "on the host"},
    "chunked loss": {"loss": "chunked"},
    "few shapes, memory reused": {"shapes": "few, memory reused"},
    "all of these, bf16": {
        "precision": "bf16",
        "recompute": "blocks",
        "activations": "on the host",
        "loss": "chunked",
        "shapes": "few, memory reused",
    },
    "untied": {"model": "untied"},
    "frozen vision": {"model": "frozen vision"},
    "packed rows": {"schedule": "pack"},
}
"""Columns of the table: precision, memory, then model and schedule; the rest is plain."""


_ONE_IN = 4


def table_places() -> Iterator[tuple[str, str, bool]]:
    """Yield each row and column of the table, and whether `make test-slow` tries their cell.

    One in four, along diagonals: so each layout and each column is tried in several.
    """
    for row, layout in enumerate(LAYOUTS):
        for place, column in enumerate(COLUMNS):
            yield layout, column, (row + place) % _ONE_IN == 0


def table_cell(layout: str, column: str) -> Cell:
    """Return the cell of a row and a column."""
    return make_cell(f"{layout} | {column}", **{**LAYOUTS[layout], **COLUMNS[column]})
