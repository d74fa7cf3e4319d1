"""The cells of promise 3: how a run ends early, under which setting, and what a rank does for it.

In: nothing. Out: endings, settings, and `attempt`, which real ranks execute. Every run of a cell
has a sample that cannot be read and a step whose gradient is not finite, and goes over the border
between two epochs, so that each resume has all of it before or behind it.
"""

from __future__ import annotations

import multiprocessing
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diptych.core.records import Layout, LoraSpec, ModelSpec, ScheduleSpec
from tests.conftest import TINY_MODEL, TINY_SCHEDULE

NUM_STEPS, BORDER = 14, 10
"""80 samples in batches of 8: the second epoch begins behind step 10."""
NOT_FINITE = 5
"""Step 5's images hold infinities, so it is skipped."""
SAVED_EVERY = 3


@dataclass(frozen=True)
class Stop:
    """Is asked to stop, and saves after this step."""

    after: int


@dataclass(frozen=True)
class Kill:
    """Ends within this step, between its first micro-batch and its second; saves nothing."""

    within: int


@dataclass(frozen=True)
class CutOff:
    """Stops after this step; the save that was due next is cut off, and its folder is left."""

    after: int


Ending = Stop | Kill | CutOff

IN_TURN: tuple[Ending, ...] = (
    Stop(1),
    Stop(NOT_FINITE),
    Kill(8),
    CutOff(BORDER - 1),
    Stop(BORDER),
    Stop(BORDER + 1),
)
"""Behind a skipped step, within one, around an epoch's border, over a save that was cut off."""
AT_EVERY_STEP: tuple[Ending, ...] = tuple(map(Stop, range(1, NUM_STEPS)))
ENDINGS = {"stopped and killed in turn": IN_TURN, "stopped after every step": AT_EVERY_STEP}
"""How a run ends before its last step, several times one after another."""
SOME: tuple[Ending, ...] = (Stop(NOT_FINITE), Kill(8), Stop(BORDER))
"""Fewer, for what is kept beside AdamW's moments."""


@dataclass(frozen=True)
class Setting:
    """What a run trains and how, and which package it needs."""

    layout: Layout
    schedule: ScheduleSpec = TINY_SCHEDULE
    model: ModelSpec = TINY_MODEL
    optimizer: dict[str, Any] = field(default_factory=dict)
    identity: dict[str, Any] = field(default_factory=dict)
    placement: dict[str, Any] = field(default_factory=dict)
    endings: tuple[Ending, ...] = SOME
    needs: str | None = None


def _layout(engine: str, *, micro_batch: int = 2, **fields: Any) -> Layout:
    return Layout.model_validate({"engine": engine, "micro_batch": micro_batch, **fields})


# The scale begins where the tiny model's gradients overflow, and grows again after three steps.
_FP16 = {
    "precision": "fp16",
    "mixed_precision": {"loss_scale": {"initial": 2.0**24, "growth_interval": 3}},
}
_DDP, _FSDP2 = {"dp": 2}, {"shard": 2}
_PACKS = ScheduleSpec(mode="pack", global_batch=4, window_shards=2, max_row_tokens=160)

LAYOUTS: dict[str, Layout] = {
    "one process": _layout("ddp", micro_batch=4),
    "ddp, 2 ranks": _layout("ddp", **_DDP),
    "fsdp2, 2 ranks": _layout("fsdp2", **_FSDP2),
    "hsdp, 2 x 2 ranks": _layout("fsdp2", dp=2, shard=2, micro_batch=1),
    "zero 1, 2 ranks": _layout("zero", shard=2, zero={"stage": 1}),
    "zero 2, 2 ranks": _layout("zero", shard=2, zero={"stage": 2}),
    "zero 3, 2 ranks": _layout("zero", shard=2, zero={"stage": 3}),
}
"""Rows of the first table."""
AT_EVERY_STEP_TOO = ("one process", "ddp, 2 ranks", "fsdp2, 2 ranks", "zero 2, 2 ranks")

_EMA = {"ema_decay": 0.9}
_LORA = TINY_MODEL.model_copy(update={"lora": LoraSpec(rank=4, dropout=0.1)})
_FROZEN = TINY_MODEL.model_copy(update={"freeze": ("vision",)})

SETTINGS: dict[str, Setting] = {
    "fp16, ddp": Setting(_layout("ddp", **_DDP, **_FP16)),
    "fp16, fsdp2": Setting(_layout("fsdp2", **_FSDP2, **_FP16)),
    "fp16, zero 2": Setting(_layout("zero", shard=2, zero={"stage": 2}, **_FP16)),
    "bf16, zero 3": Setting(_layout("zero", shard=2, zero={"stage": 3}, precision="bf16")),
    "mean of the weights (EMA), fsdp2": Setting(LAYOUTS["fsdp2, 2 ranks"], identity=_EMA),
    "mean of the weights (EMA), zero 2": Setting(LAYOUTS["zero 2, 2 ranks"], identity=_EMA),
    "Muon, ddp": Setting(
        LAYOUTS["ddp, 2 ranks"], optimizer={"kind": "muon", "lr": 3e-3}, identity=_EMA
    ),
    "8-bit AdamW, ddp": Setting(
        LAYOUTS["ddp, 2 ranks"], optimizer={"kind": "adamw_8bit"}, needs="torchao"
    ),
    "LoRA with dropout, ddp": Setting(LAYOUTS["ddp, 2 ranks"], model=_LORA),
    "LoRA with dropout, zero 3": Setting(LAYOUTS["zero 3, 2 ranks"], model=_LORA),
    "frozen vision tower, fsdp2": Setting(LAYOUTS["fsdp2, 2 ranks"], model=_FROZEN),
    "frozen vision tower, zero 2 in bf16": Setting(
        _layout("zero", shard=2, zero={"stage": 2}, precision="bf16"), model=_FROZEN
    ),
    "packed rows, one process": Setting(_layout("ddp"), schedule=_PACKS),
    "packed rows, fsdp2": Setting(_layout("fsdp2", micro_batch=1, **_FSDP2), schedule=_PACKS),
    "rows of one bucket, 2 loader workers a rank": Setting(
        LAYOUTS["ddp, 2 ranks"], placement={"num_workers": 2}
    ),
    "packed rows, 2 loader workers": Setting(
        _layout("ddp"), schedule=_PACKS, placement={"num_workers": 2}
    ),
    "states on the host, fsdp2": Setting(
        _layout("fsdp2", fsdp={"offload": True, "pin_memory": False}, **_FSDP2)
    ),
    "states on the host, zero 2": Setting(
        _layout("zero", shard=2, zero={"stage": 2, "optimizer": {"to": "cpu", "adam": "torch"}})
    ),
    # Weights are averaged before every save: other saves would be another run.
    "local SGD, killed only": Setting(
        _layout("ddp", **_DDP, ddp={"local_sgd_period": 4, "local_sgd_start_step": 2}),
        endings=(Kill(8), Kill(BORDER + 1)),
    ),
}
"""Rows of the second table, with what a run keeps beside AdamW's moments in fp32."""


def attempt(
    folder: Path,
    *,
    stop_after: int | None = None,
    kill_within: int | None = None,
    fault: str = "",
    eagerly: bool = False,
) -> int:
    """Train a run on this rank until it ends; returns the next step.

    `fault` is one to be found; `eagerly` compiles nothing, which for 8-bit AdamW takes minutes.
    """
    import torch

    from diptych import worker
    from tests.runs import train_rank

    # As in earnest: a daemon, as a pool's ranks are, may not have a loader's workers, and a process
    # that was spawned would spawn them.
    multiprocessing.current_process()._config["daemon"] = False
    multiprocessing.set_start_method("fork", force=True)
    noting, placing = worker._noting_masked, worker.place_on
    restore = worker.Checkpoints.restore
    worker._noting_masked = lambda loader, **asked: _planted(
        noting(loader, **asked), kill_within=kill_within
    )
    worker.place_on = lambda *asked, **options: _falling(placing(*asked, **options))
    if fault:
        worker.Checkpoints.restore = lambda self: _FAULTS[fault](
            self, engine=self._engine, restore=restore
        )
    try:
        with torch.compiler.set_stance("force_eager") if eagerly else nullcontext():
            return train_rank(folder, stop_at=stop_after)
    finally:
        worker._noting_masked, worker.place_on = noting, placing
        worker.Checkpoints.restore = restore


def _planted(batches: Any, *, kill_within: int | None) -> Any:
    """Spoil the images of one step, and mark the micro-batch that a rank does not come through."""
    import torch

    for batch in batches:
        for number, micro in enumerate(batch.micro_batches, start=1):
            if batch.step + 1 == NOT_FINITE:
                pixels = micro.pixel_values_PD
                micro.pixel_values_PD = torch.full_like(pixels, float("inf"))
            micro.is_last_seen = batch.step + 1 == kill_within and number == 2
        yield batch


def _falling(place: Any) -> Any:
    def placed(micro: Any) -> Any:
        if getattr(micro, "is_last_seen", False):
            raise ConnectionError("a planned fault")
        return place(micro)

    return placed


def _without_loader(self: Any, *, engine: Any, restore: Any) -> Any:
    """Saved and never restored: the data begins anew."""
    from diptych.core.records import LoaderState

    state, loader = restore(self)
    return state, LoaderState(schedule_sha256=loader.schedule_sha256)


def _without_moments(self: Any, *, engine: Any, restore: Any) -> Any:
    state = restore(self)
    for name, tensor in engine.tensors().items():
        if name.endswith(".exp_avg"):
            tensor.zero_()
    return state


def _without_counters(self: Any, *, engine: Any, restore: Any) -> Any:
    state = restore(self)
    if state[0].step:
        engine.take(engine.tensors(), num_updates=0)
    return state


def _without_engine(self: Any, *, engine: Any, restore: Any) -> Any:
    """The loss scale begins anew."""
    kept = engine.restore
    engine.restore = lambda state: None
    try:
        return restore(self)
    finally:
        engine.restore = kept


def _without_skipped(self: Any, *, engine: Any, restore: Any) -> Any:
    state, loader = restore(self)
    state.skipped_steps.clear()
    return state, loader


_FAULTS = {
    "the loader's state is not restored": _without_loader,
    "a moment is not restored": _without_moments,
    "the optimizer's counters are not restored": _without_counters,
    "the loss scale is not restored": _without_engine,
    "skipped steps are not restored": _without_skipped,
}
FAULTS = tuple(_FAULTS)
"""Of others; each has to be found by the comparison that the cells rest on."""
