"""Runs for tests: a spec over the tiny corpus, and functions that real ranks execute."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from diptych.core.records import (
    Identity,
    Layout,
    LoaderState,
    Placement,
    Provenance,
    RunSpec,
)


def make_spec(
    corpus: Any,
    *,
    layout: Layout,
    model: Any,
    schedule: Any,
    num_steps: int = 6,
    checkpoint_every_steps: int = 2,
    heldout_every_steps: int = 3,
    **optimizer: Any,
) -> RunSpec:
    from diptych.core.records import OptimizerSpec
    from diptych.data.processor import read_processor_info

    return RunSpec(
        identity=Identity(
            manifest_sha256=corpus.manifest.sha256,
            processor_sha256=read_processor_info(corpus.processor).sha256,
            model=model,
            schedule=schedule,
            buckets=corpus.buckets,
            optimizer=OptimizerSpec(**{"warmup_steps": 2, "lr": 1e-3, **optimizer}),
            num_steps=num_steps,
            seed=0,
        ),
        placement=Placement(
            layout=layout,
            num_workers=0,
            threads_per_rank=1,
            log_every_steps=1,
            checkpoint_every_steps=checkpoint_every_steps,
            checkpoint_min_interval_s=0.0,
            keep_checkpoints=10,
            heldout_every_steps=heldout_every_steps,
            heldout_max_samples=8,
            max_restarts=0,
            shards=str(corpus.shards),
            manifest=str(corpus.manifest_path),
            sample_costs=str(corpus.sample_costs),
            processor=str(corpus.processor),
        ),
        provenance=Provenance(git_commit=None, git_dirty=None, source_sha256="test", versions={}),
    )


def _world() -> Any:
    import torch
    import torch.distributed as dist

    from diptych.parallel.mesh import World

    return World(rank=dist.get_rank(), size=dist.get_world_size(), device=torch.device("cpu"))


def train_rank(folder: Path, *, stop_at: int | None = None, die_at: int | None = None) -> int:
    """Train a run on this rank; stop, or raise, before a step; returns the next step."""
    from diptych import worker
    from diptych.monitor.run_folder import RunFolder

    class Counter:
        def __init__(self, run_folder: Any, *, world: Any) -> None:
            self.calls = None

        def __call__(self) -> bool:
            steps = RunFolder(folder).read_steps()
            step = steps[-1].step if steps else 0
            if die_at is not None and step == die_at:
                raise ConnectionError("a planned fault")
            return stop_at is not None and step >= stop_at

    original = worker.StopRequest
    worker.StopRequest = Counter
    try:
        run = RunFolder(folder)
        return worker.train_run(run, spec=run.read_spec(), world=_world()).step
    finally:
        worker.StopRequest = original


def trajectory(spec: RunSpec, *, num_steps: int, dtype: str = "float32") -> dict[str, Any]:
    """Train some steps from scratch; rank 0 returns the losses and the whole first gradient."""
    import torch
    from torch.distributed.tensor import DTensor

    from diptych.core.records import Manifest
    from diptych.data.costs import load_costs
    from diptych.data.loader import Loader
    from diptych.data.processor import read_processor_info
    from diptych.data.schedule.schedule import Schedule
    from diptych.model.assemble import build
    from diptych.model.families import blocks
    from diptych.parallel.engine import spread
    from diptych.parallel.mesh import gather_numbers
    from diptych.train.optimizers import build_optimizer
    from diptych.train.step import LossModule, run_step

    world = _world()
    identity, placement = spec.identity, spec.placement
    manifest = Manifest.model_validate_json(Path(placement.manifest).read_text())
    info = read_processor_info(Path(placement.processor))
    model = build(identity.model, tokens=info.tokens, image=info.image, seed=0)
    model.to(getattr(torch, dtype))
    units = [module for _, module in blocks(model)]
    loss = LossModule(model, num_sources=len(manifest.sources))
    engine = spread(loss, units=units, layout=placement.layout, world=world)
    optimizer = build_optimizer(model, spec=identity.optimizer)
    costs = load_costs(Path(placement.sample_costs), manifest=manifest, split="train")
    loader = Loader(
        shards=Path(placement.shards),
        manifest=manifest,
        processor=Path(placement.processor),
        schedule=Schedule(costs, buckets=identity.buckets, spec=identity.schedule),
        split="train",
        rank=world.rank,
        world_size=world.size,
        micro_batch=placement.layout.micro_batch,
        num_workers=0,
        state=LoaderState(),
    )
    gradient: list[np.ndarray] = []

    def keep(optimizer: Any, args: Any, kwargs: Any) -> None:
        if not gradient:
            for parameter in model.parameters():
                grad = parameter.grad
                full = grad.full_tensor() if isinstance(grad, DTensor) else grad
                gradient.append(full.detach().double().numpy().ravel().copy())

    optimizer.register_step_pre_hook(keep)
    losses, imageless = [], 0
    batches = iter(loader)
    for _ in range(num_steps):
        batch = next(batches)
        for micro in batch.micro_batches:
            micro.pixel_values_PD = micro.pixel_values_PD.to(getattr(torch, dtype))
            imageless += micro.num_image_tokens == 0
        totals = gather_numbers([batch.num_label_tokens], world=world).sum()
        result = run_step(
            batch.micro_batches,
            engine=engine,
            optimizer=optimizer,
            num_label_tokens=int(totals),
            max_grad_norm=1e9,
        )
        losses.append(float(gather_numbers([result.loss_sum], world=world).sum() / totals))
    return {
        "losses": np.array(losses),
        "gradient": np.concatenate(gradient),
        "imageless": int(gather_numbers([imageless], world=world).sum()),
        "pid": os.getpid(),
    }
