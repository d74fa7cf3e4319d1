"""The entry of a rank: a run folder in, a trained run out. It never imports Kedro.

`python -m diptych.worker train <folder>`, started by torch elastic in the project's folder; with
`preflight` in place of `train` it only looks at the machine. It composes the parts (data, model,
layout, loop) that do not know each other.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record as report_errors
from transformers import PreTrainedModel

from diptych.core.errors import ConfigError, FormatError, LayoutError, RunError
from diptych.core.floors import check_floors
from diptych.core.hashing import sha256_json
from diptych.core.layouts import fit_layout
from diptych.core.records import LoaderState, Manifest, RunSpec, StepRecord, WhatTrains
from diptych.data.batcher import Batcher
from diptych.data.collate import Multiples
from diptych.data.costs import load_costs
from diptych.data.images.features import Features
from diptych.data.loader import Loader, StepBatch, heldout_batches
from diptych.data.processor import read_processor_info
from diptych.data.schedule.schedule import Schedule
from diptych.data.shards.manifest import load_manifest
from diptych.launch import process
from diptych.launch.agreement import OthersTrainError, agree
from diptych.launch.attempts import finish_run, open_attempt, stop_attempt
from diptych.launch.ranks import check_ranks
from diptych.launch.words import rank_log
from diptych.model.assemble import build
from diptych.model.attention import kernels
from diptych.model.families import family_name, torch_side, units
from diptych.model.features import feature_width, freeze, take_features, vision_sha256
from diptych.model.streaming import Reading
from diptych.monitor.run_folder import RunFolder, StepLog
from diptych.parallel import mesh
from diptych.parallel.buffers import place_on
from diptych.parallel.engine import Engine
from diptych.parallel.mesh import World
from diptych.parallel.spread import spread
from diptych.shape.attention import Choice
from diptych.train.begin import begin_from, count_former_updates
from diptych.train.checkpoints import Checkpoints, note_masked_keys
from diptych.train.features import fill
from diptych.train.heldout import measure_heldout_loss
from diptych.train.loop import Hooks, LoopSettings, TrainState, train
from diptych.train.optimizers import build_optimizer
from diptych.train.retention import Keep
from diptych.train.step import LossModule
from diptych.train.trains import what_trains, write_table

_LOG = logging.getLogger("diptych.worker")


class StopRequest:
    """Set by a signal to this rank, or by the file `stop` in the run's folder."""

    def __init__(self, folder: RunFolder, *, world: World) -> None:
        self._path = folder.stop if world.is_first else None
        self._signalled = False
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, self._on_signal)

    def __call__(self) -> bool:
        """Whether this rank was asked to save and stop."""
        return self._signalled or (self._path is not None and self._path.exists())

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signalled = True


@dataclass(frozen=True)
class _Parts:
    """What a rank trains with."""

    engine: Engine
    schedule: Schedule
    manifest: Manifest
    features: Features | None
    trains: WhatTrains
    attention: Choice


def main(arguments: list[str] | None = None) -> None:
    """Run one rank."""
    parser = argparse.ArgumentParser(prog="diptych.worker", description=__doc__)
    parser.add_argument("mode", choices=["train", "preflight"])
    parser.add_argument("run", type=Path, help="the run's folder")
    parser.add_argument("logs", type=Path, nargs="?", help="the folder of this rank's log")
    options = parser.parse_args(arguments)
    process.die_with_parent()
    if options.logs is not None:
        write_log(options.logs, rank=int(os.environ.get("RANK", "0")))
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    if options.mode == "preflight":
        run_preflight(options.run, logs=options.logs or options.run)
    else:
        run_training(options.run)


def write_log(logs: Path, *, rank: int) -> None:
    """Have all that this process prints, its libraries included, appended to the rank's log."""
    logs.mkdir(parents=True, exist_ok=True)
    with rank_log(logs, rank=rank).open("ab") as file:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(file.fileno(), stream.fileno())


@report_errors
def run_training(path: Path) -> None:
    """Train the run of a folder from its newest checkpoint, if any, until done or stopped."""
    folder = RunFolder(path)
    try:
        _run_training(folder)
    except OthersTrainError:
        raise  # the folder is theirs
    except (ConfigError, FormatError, LayoutError, RunError) as error:
        # Starting the ranks once more would end in the same way: the launcher reads this.
        folder.write_status("failed", **_where(folder), error=f"{type(error).__name__}: {error}")
        raise


def _where(folder: RunFolder) -> dict[str, Any]:
    """Take over how far the run is said to be."""
    status = folder.read_status()
    return {name: status[name] for name in ("step", "num_steps") if name in status}


def _run_training(folder: RunFolder) -> None:
    check_floors()
    spec = fit(folder.read_spec(), world_size=int(os.environ.get("WORLD_SIZE", "1")))
    torch.set_num_threads(spec.placement.threads_per_rank)
    network = spec.placement.launch.network
    world = mesh.join(spec.placement.layout, timeout_s=network.timeout_s)
    # Its lock is held until this process ends.
    agreement = agree(folder.path, world=world, timeout_s=network.timeout_s)
    agreement.refuse_failed()
    train_run(folder, spec=spec, world=world)
    # A rank that fails just ends, and the others with it: leaving waits for the exchange that is
    # under way, and so for ranks that may never come to it.
    mesh.leave()


def fit(spec: RunSpec, *, world_size: int) -> RunSpec:
    """Return the spec for as many ranks as there are, where a run may go on with other nodes."""
    placement = spec.placement
    if placement.launch.min_nodes is None or world_size == placement.layout.world_size:
        return spec
    layout = fit_layout(placement.layout, world_size=world_size)
    return spec.model_copy(update={"placement": placement.model_copy(update={"layout": layout})})


@report_errors
def run_preflight(path: Path, *, logs: Path) -> None:
    """Look at what a run in this folder would meet, and leave it beside the logs."""
    spec = RunFolder(path).read_spec()
    torch.set_num_threads(spec.placement.threads_per_rank)
    timeout_s = spec.placement.launch.network.timeout_s
    world = mesh.join(spec.placement.layout, timeout_s=timeout_s)
    check_ranks(path, logs=logs, spec=spec, world=world)
    mesh.leave()


def train_run(folder: RunFolder, *, spec: RunSpec, world: World) -> TrainState:
    """Train one rank's part of a run, inside a process group that is there already."""
    parts = _assemble(spec, world=world)
    try:
        return _train(folder, spec=spec, world=world, parts=parts)
    finally:
        parts.engine.close()


def _train(folder: RunFolder, *, spec: RunSpec, world: World, parts: _Parts) -> TrainState:
    checkpoints = _checkpoints(folder, spec=spec, parts=parts, world=world)
    try:
        return _train_from(checkpoints, folder=folder, spec=spec, world=world, parts=parts)
    finally:
        checkpoints.close()


def _checkpoints(folder: RunFolder, *, spec: RunSpec, parts: _Parts, world: World) -> Checkpoints:
    placement = spec.placement
    return Checkpoints(
        folder.checkpoints,
        engine=parts.engine,
        identity_sha256=spec.identity.sha256,
        schedule_sha256=parts.schedule.sha256,
        keep=Keep(
            last=placement.keep_checkpoints,
            every_steps=placement.keep_every_steps,
            best=placement.keep_best,
        ),
        saving=placement.checkpoint_saving,
        world=world,
    )


def _train_from(
    checkpoints: Checkpoints, *, folder: RunFolder, spec: RunSpec, world: World, parts: _Parts
) -> TrainState:
    started_s = time.time()
    state, loader_state = checkpoints.restore()
    if spec.identity.parent is not None:
        state, loader_state = _begin_or_go_on(
            state, loader_state, folder=folder, spec=spec, parts=parts, world=world
        )
    attempt = -1
    if world.is_first:
        facts = {"attention": asdict(parts.attention), "passed_over": checkpoints.passed_over}
        attempt = open_attempt(folder, spec=spec, step=state.step, facts=facts)
        folder.write_what_trains(parts.trains)
        _LOG.info("what trains:\n%s", write_table(parts.trains))
    attempt = int(mesh.gather_numbers([attempt], world=world)[0, 0])
    loader = _loader(spec, parts=parts, state=loader_state, world=world)
    log = StepLog(folder.steps) if world.is_first else None
    heldout = heldout_batches(
        Batcher(
            shards=spec.placement.shards,
            manifest=parts.manifest,
            processor=Path(spec.placement.processor),
            split="heldout",
            features=parts.features,
            multiples=_multiples(spec),
        ),
        costs=Path(spec.placement.sample_costs),
        max_samples=spec.placement.heldout_max_samples,
        micro_batch=spec.placement.layout.micro_batch,
        rank=world.rank,
        world_size=world.size,
    )

    place = place_on(world.device, reuse=spec.placement.layout.memory.reuse_buffers)

    def write(record: StepRecord) -> None:
        checkpoints.note(record)
        if log is not None:
            log.write(record)

    state = train(
        _noting_masked(loader, folder=folder, world=world),
        engine=parts.engine,
        state=state,
        settings=LoopSettings(
            num_steps=spec.identity.num_steps,
            seed=spec.identity.seed,
            optimizer=spec.identity.optimizer,
            checkpoint_every_steps=spec.placement.checkpoint_every_steps,
            heldout_every_steps=spec.placement.heldout_every_steps,
            checkpoint_min_interval_s=spec.placement.checkpoint_min_interval_s,
            weights_every_steps=spec.placement.weights_every_steps or 0,
            scores_saves=(spec.placement.keep_best or "").startswith("heldout_loss"),
            attempt=attempt,
            sources=parts.manifest.sources,
            release_cache_every_steps=spec.placement.layout.memory.release_cache_every_steps,
            name_nonfinite=spec.placement.name_nonfinite,
        ),
        hooks=Hooks(
            record=write,
            saves=checkpoints,
            heldout=lambda: measure_heldout_loss(
                heldout,
                engine=parts.engine,
                world=world,
                num_sources=len(parts.manifest.sources),
                place=place,
            ),
            stop_requested=StopRequest(folder, world=world),
            place=place,
        ),
        world=world,
    )
    if log is not None:
        log.close()
        _close(folder, spec=spec, state=state, started_s=started_s)
    return state


def _close(folder: RunFolder, *, spec: RunSpec, state: TrainState, started_s: float) -> None:
    """Say that the run is finished, or stopped where it is."""
    if state.stopped:
        stop_attempt(folder, spec=spec, step=state.step)
        return
    num_skipped = len(state.skipped_steps)
    finish_run(
        folder, spec=spec, num_masked=state.num_masked, num_skipped=num_skipped, started_s=started_s
    )


def _begin_or_go_on(
    state: TrainState,
    loader_state: LoaderState,
    *,
    folder: RunFolder,
    spec: RunSpec,
    parts: _Parts,
    world: World,
) -> tuple[TrainState, LoaderState]:
    """Begin a forked run with its parent's checkpoint, unless it has had one of its own."""
    parent, checkpoint = spec.identity.parent, spec.placement.parent_checkpoint
    assert parent is not None, "a run without a parent begins anew"
    assert checkpoint is not None, "what names a parent says where it lies"
    if not state.step:
        state, loader_state = begin_from(
            Path(checkpoint),
            engine=parts.engine,
            parent=parent,
            schedule_sha256=parts.schedule.sha256,
            run_folder=folder.path,
            world=world,
        )
    state.num_former_updates = count_former_updates(parent, state=state)
    return state, loader_state


def _assemble(spec: RunSpec, *, world: World) -> _Parts:
    identity, placement = spec.identity, spec.placement
    info = read_processor_info(Path(placement.processor))
    manifest = load_manifest(Path(placement.manifest))
    # Features of a frozen tower are computed by a model that is whole on every rank.
    streams = identity.model.has_files and placement.vision_features is None
    model = build(
        identity.model,
        tokens=info.tokens,
        image=info.image,
        seed=identity.seed,
        device="meta" if streams else "cpu",
    )
    weights = None
    if streams:
        weights = Reading(model, spec=identity.model, seed=identity.seed, device=world.device)
    else:
        nn.Module.to(model, world.device)
    freeze(model, frozen=identity.model.freeze)
    attention = _choose_attention(model, spec=spec, world=world)
    features = _features(model, spec=spec, manifest=manifest, world=world)
    tables: list[WhatTrains] = []

    def build_and_table(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = build_optimizer(model, spec=identity.optimizer, ema_decay=identity.ema_decay)
        # Now, for DeepSpeed puts flat weights in the place of the model's.
        tables.append(what_trains(model, optimizer=optimizer))
        return optimizer

    engine = spread(
        LossModule(
            model,
            num_sources=len(manifest.sources),
            options=placement.layout.memory,
            label_smoothing=identity.label_smoothing,
            contrast=identity.contrast,
        ),
        model=model,
        units=units(model),
        layout=placement.layout,
        world=world,
        build_optimizer=build_and_table,
        weights=weights,
    )
    costs = load_costs(
        Path(placement.sample_costs),
        manifest=manifest,
        split="train",
        processor_sha256=identity.processor_sha256,
    )
    return _Parts(
        engine=engine,
        schedule=Schedule(costs, buckets=identity.buckets, spec=identity.schedule),
        manifest=manifest,
        features=features,
        trains=tables[0],
        attention=attention,
    )


def _choose_attention(model: PreTrainedModel, *, spec: RunSpec, world: World) -> Choice:
    """Have the decoder compute attention with the kernel that runs on every rank."""
    choice = kernels.choose_with_others(
        spec.placement.layout,
        model_family=family_name(model),
        sizes=torch_side(family_name(model)).sizes_of(model.config),
        is_packed=spec.identity.schedule.mode == "pack",
        device=world.device,
        gather=partial(mesh.gather_numbers, world=world),
    )
    kernels.use(model, kernel=choice.kernel)
    if world.is_first:
        _LOG.info("attention: %s", choice)
    return choice


def _features(
    model: nn.Module, *, spec: RunSpec, manifest: Manifest, world: World
) -> Features | None:
    """Have the frozen tower compute what is not kept yet, and the model take that instead."""
    placement = spec.placement
    if placement.vision_features is None:
        return None
    info = read_processor_info(Path(placement.processor))
    features = Features(
        folder=Path(placement.vision_features),
        vision_sha256=sha256_json([vision_sha256(model), info.sha256]),
        width=feature_width(model),
    )
    fill(
        features,
        model=model,
        processor=Path(placement.processor),
        shards=placement.shards,
        manifest=manifest,
        world=world,
    )
    take_features(model)
    return features


def _loader(spec: RunSpec, *, parts: _Parts, state: LoaderState, world: World) -> Loader:
    return Loader(
        shards=spec.placement.shards,
        manifest=parts.manifest,
        processor=Path(spec.placement.processor),
        schedule=parts.schedule,
        split="train",
        rank=world.rank,
        world_size=world.size,
        micro_batch=spec.placement.layout.micro_batch,
        num_workers=spec.placement.num_workers,
        state=state,
        image_cache=Path(spec.placement.image_cache) if spec.placement.image_cache else None,
        image_cache_bytes=spec.placement.image_cache_bytes,
        features=parts.features,
        multiples=_multiples(spec),
    )


def _multiples(spec: RunSpec) -> Multiples:
    memory = spec.placement.layout.memory
    return Multiples(tokens=memory.token_multiple, patches=memory.patch_multiple)


def _noting_masked(loader: Loader, *, folder: RunFolder, world: World) -> Iterator[StepBatch]:
    for batch in loader:
        if batch.masked_keys:
            _LOG.warning("step %d: masked %s", batch.step, ", ".join(batch.masked_keys))
            note_masked_keys(folder.path, rank=world.rank, step=batch.step, keys=batch.masked_keys)
        yield batch
    raise AssertionError("a loader goes on without end, and this rank's has ended")


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
