"""Runs for tests: a spec over the tiny corpus, and functions that real ranks execute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from diptych.core.records import (
    Identity,
    Layout,
    Placement,
    Provenance,
    Run,
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
    identity: dict[str, Any] | None = None,
    **optimizer: Any,
) -> RunSpec:
    """Make a spec; `identity` has further fields of it."""
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
            **(identity or {}),
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


def save_checkpoint(folder: Path, tensors: dict[str, Any], *, means: Any = None) -> None:
    """Write a checkpoint of weights by full name, and of their moving averages."""
    import torch

    from diptych.parallel.mesh import World
    from diptych.parallel.storage import MODEL_PREFIX, OPTIMIZER_PREFIX, save

    world = World(rank=0, size=1, device=torch.device("cpu"))
    named = {MODEL_PREFIX + name: tensor for name, tensor in tensors.items()}
    named |= {f"{OPTIMIZER_PREFIX}{name}.ema": tensor for name, tensor in (means or {}).items()}
    save(folder, tensors=named, state={"step": 6}, world=world)


def finish_run(
    spec: RunSpec, *, runs: Path, weights: dict[str, Any], means: dict[str, Any] | None = None
) -> Run:
    """Write the folder of a finished run, with a checkpoint of these weights; return its record."""
    folder = runs / spec.run_id
    folder.mkdir()
    (folder / "run_spec.json").write_text(spec.model_dump_json())
    checkpoint = folder / "checkpoints" / "step-00000006"
    save_checkpoint(checkpoint, weights, means=means)
    return Run(
        run_id=spec.run_id,
        identity_sha256=spec.identity.sha256,
        folder=str(folder),
        checkpoint=str(checkpoint),
        num_steps=6,
        final_loss=2.345678,
        final_heldout_loss=2.5,
        train_s=75.0,
        num_attempts=1,
        world_size=1,
        num_masked=3,
        num_skipped=1,
        source_sha256="test",
    )


def _world() -> Any:
    import torch
    import torch.distributed as dist

    from diptych.parallel.mesh import World

    return World(rank=dist.get_rank(), size=dist.get_world_size(), device=torch.device("cpu"))


def train_rank(folder: Path, *, stop_at: int | None = None, die_at: int | None = None) -> int:
    """Train a run on this rank; stop, or raise, after so many steps; returns the next step."""
    from diptych import worker
    from diptych.monitor.run_folder import RunFolder

    class Counter:
        def __init__(self, run_folder: Any, *, world: Any) -> None:
            # The log is cut where the attempt begins. The loop asks once before that step, and
            # then as every step begins.
            self._num_done = len(RunFolder(folder).read_steps()) - 2

        def __call__(self) -> bool:
            self._num_done += 1
            if die_at is not None and self._num_done == die_at:
                raise ConnectionError("a planned fault")
            # Heeded after the step that begins.
            return stop_at is not None and self._num_done + 1 >= stop_at

    original = worker.StopRequest
    worker.StopRequest = Counter
    try:
        run = RunFolder(folder)
        return worker.train_run(run, spec=run.read_spec(), world=_world()).step
    finally:
        worker.StopRequest = original


def trajectory(
    spec: RunSpec, *, num_steps: int, dtype: str = "float32", gradient_factor: float = 1.0
) -> dict[str, Any]:
    """Train some steps from scratch, assembled as a run is, without checkpoints.

    Returns, on every rank: the losses, the whole first gradient (what trains, in the model's
    order), how many micro-batches of all ranks had no image, how many steps were skipped, and which
    lengths this rank's rows were padded to. `gradient_factor` is a fault to be found.
    """
    import torch

    from diptych import assembly
    from diptych.core.records import LoaderState
    from diptych.parallel.buffers import place_on
    from diptych.parallel.mesh import gather_numbers
    from diptych.train.schedules import learning_rate
    from diptych.train.step import run_step

    world = _world()
    build = assembly.build
    assembly.build = lambda *args, **kwargs: build(*args, **kwargs).to(getattr(torch, dtype))
    try:
        parts = assembly.assemble(spec, world=world)
    finally:
        assembly.build = build
    engine = parts.engine
    if gradient_factor != 1.0:
        _scale_gradients(engine, factor=gradient_factor)
    batches = iter(assembly.make_loader(spec, parts=parts, state=LoaderState(), world=world))
    gradient: list[np.ndarray] = []
    losses, num_imageless, num_skipped, lengths = [], 0, 0, set()
    place = place_on(world.device, reuse=spec.placement.layout.memory.reuse_buffers)
    _before_first_update(engine, lambda: gradient.extend(whole_gradients(engine)))
    engine.module.train()
    for step in range(num_steps):
        batch = next(batches)
        for micro in batch.micro_batches:
            micro.pixel_values_PD = micro.pixel_values_PD.to(getattr(torch, dtype))
            num_imageless += micro.num_image_tokens == 0
            lengths.add(micro.input_ids_BS.shape[1])
        counts = [batch.num_label_tokens, batch.num_paired]
        totals, num_paired = gather_numbers(counts, world=world).sum(axis=0)
        result = run_step(
            batch.micro_batches,
            engine=engine,
            num_label_tokens=int(totals),
            num_paired=int(num_paired),
            lr=learning_rate(step, spec=spec.identity.optimizer, num_steps=num_steps),
            max_grad_norm=1e9,
            place=place,
        )
        num_skipped += not result.update.applied
        losses.append(float(gather_numbers([result.loss_sum], world=world).sum() / totals))
    engine.close()
    return {
        "losses": np.array(losses),
        "gradient": np.concatenate(gradient),
        "imageless": int(gather_numbers([num_imageless], world=world).sum()),
        "skipped": num_skipped,
        "lengths": lengths,
    }


def whole_gradients(engine: Any) -> list[np.ndarray]:
    """Collect what `update` is about to use, of every trained parameter, whole, on every rank."""
    from torch.distributed.tensor import DTensor

    gradients = []
    for parameter in engine.model.parameters():
        if parameter.requires_grad:
            gradient = parameter.grad
            if isinstance(gradient, DTensor):
                gradient = gradient.full_tensor()
            elif gradient is None or hasattr(parameter, "ds_id"):
                from deepspeed.utils import safe_get_full_grad

                gradient = safe_get_full_grad(parameter)
            gradients.append(gradient.detach().double().cpu().numpy().ravel().copy())
    return gradients


def _before_first_update(engine: Any, look: Any) -> None:
    update = engine.update

    def looked(**arguments: Any) -> Any:
        engine.update = update
        look()
        return update(**arguments)

    engine.update = looked


def _scale_gradients(engine: Any, *, factor: float) -> None:
    backward = engine.backward
    engine.backward = lambda loss, *, weight, **options: backward(
        loss, weight=weight * factor, **options
    )
