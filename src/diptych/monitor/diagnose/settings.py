"""What a run was set to, as far as rules read it: a run spec in, plain values out."""

from __future__ import annotations

from typing import Literal

from diptych.core.records import EngineName, Record, RunSpec


class Settings(Record):
    """The settings that findings are about; a run whose spec cannot be read has `None` of them.

    Names are those of the settings themselves. `num_workers` is what a rank has, 0 decodes within
    the rank.
    """

    num_ranks: int = 1
    device: Literal["cpu", "cuda"] = "cpu"
    engine: EngineName = "ddp"
    precision: str = "fp32"
    micro_batch: int = 8
    grad_sync: str = "last"
    compression: str = "none"
    reduce: str = "fp32"
    gather: str = "twice"
    compiled: tuple[str, ...] = ()
    recompute: str = "none"
    loss: str = "whole"
    allocator: str | None = None
    token_multiple: int = 1
    num_workers: int = 0
    image_cache: str | None = None
    vision_is_frozen: bool = False
    has_vision_features: bool = False
    checkpoint_every_steps: int = 100
    checkpoint_min_interval_s: float = 30.0
    checkpoint_saving: str = "auto"
    heldout_every_steps: int = 100
    heldout_max_samples: int = 128
    mode: Literal["bucket", "pack"] = "bucket"
    global_batch: int = 32
    group: int = 8
    balance_steps: int = 1
    lr: float = 1e-3
    warmup_steps: int = 0
    max_grad_norm: float | None = None
    name_nonfinite: bool = False


def read_settings(spec: RunSpec) -> Settings:
    """Take the settings out of a run's spec."""
    placement, identity = spec.placement, spec.identity
    layout, schedule = placement.layout, identity.schedule
    return Settings(
        num_ranks=layout.world_size,
        device=layout.device,
        engine=layout.engine,
        precision=layout.precision,
        micro_batch=layout.micro_batch,
        grad_sync=layout.grad_sync,
        compression=layout.ddp.compression,
        reduce=layout.mixed_precision.reduce,
        gather=layout.fsdp.gather,
        compiled=layout.compile.blocks,
        recompute=layout.memory.recompute,
        loss=layout.memory.loss,
        allocator=layout.memory.allocator,
        token_multiple=layout.memory.token_multiple,
        num_workers=placement.num_workers,
        image_cache=placement.image_cache,
        vision_is_frozen="vision" in identity.model.freeze,
        has_vision_features=placement.vision_features is not None,
        checkpoint_every_steps=placement.checkpoint_every_steps,
        checkpoint_min_interval_s=placement.checkpoint_min_interval_s,
        checkpoint_saving=placement.checkpoint_saving,
        heldout_every_steps=placement.heldout_every_steps,
        heldout_max_samples=placement.heldout_max_samples,
        mode=schedule.mode,
        global_batch=schedule.global_batch,
        group=schedule.group,
        balance_steps=schedule.balance_steps,
        lr=identity.optimizer.lr,
        warmup_steps=identity.optimizer.warmup_steps,
        max_grad_norm=identity.optimizer.max_grad_norm,
        name_nonfinite=placement.name_nonfinite,
    )
