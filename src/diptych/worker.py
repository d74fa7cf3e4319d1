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
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing.errors import record as report_errors

from diptych.assembly import Parts, assemble, make_heldout, make_loader
from diptych.core.errors import ConfigError, FormatError, LayoutError, RunError
from diptych.core.floors import check_floors
from diptych.core.layouts import fit_layout
from diptych.core.records import LoaderState, RunSpec, StepRecord
from diptych.data.loader import Loader, StepBatch
from diptych.launch import process
from diptych.launch.agreement import OthersTrainError, agree
from diptych.launch.attempts import finish_run, open_attempt, stop_attempt
from diptych.launch.ranks import check_ranks
from diptych.launch.words import rank_log
from diptych.model.inspect import inspect
from diptych.monitor.observing import observing
from diptych.monitor.run_folder import RunFolder, StepLog
from diptych.parallel import mesh
from diptych.parallel.buffers import place_on
from diptych.parallel.mesh import World
from diptych.parallel.phases import Phases
from diptych.train.begin import begin_from, count_former_updates
from diptych.train.checkpoints import Checkpoints, note_masked_keys
from diptych.train.efficiency import Efficiency
from diptych.train.heldout import measure_heldout_loss
from diptych.train.loop import Hooks, LoopSettings, TrainState, train
from diptych.train.profiler import Profiler, ProfileRequest
from diptych.train.retention import Keep
from diptych.train.trains import write_table

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
    parts = assemble(spec, world=world)
    try:
        return _train(folder, spec=spec, world=world, parts=parts)
    finally:
        parts.engine.close()


def _train(folder: RunFolder, *, spec: RunSpec, world: World, parts: Parts) -> TrainState:
    checkpoints = _checkpoints(folder, spec=spec, parts=parts, world=world)
    try:
        with ExitStack() as stack:
            return _train_from(
                checkpoints, folder=folder, spec=spec, world=world, parts=parts, stack=stack
            )
    finally:
        checkpoints.close()


def _checkpoints(folder: RunFolder, *, spec: RunSpec, parts: Parts, world: World) -> Checkpoints:
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
    checkpoints: Checkpoints,
    *,
    folder: RunFolder,
    spec: RunSpec,
    world: World,
    parts: Parts,
    stack: ExitStack,
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
    observed = _observing(folder, spec=spec, attempt=attempt, step=state.step, world=world)
    observe = stack.enter_context(observed)
    loader = make_loader(spec, parts=parts, state=loader_state, world=world)
    log = StepLog(folder.steps) if world.is_first else None
    heldout = make_heldout(spec, parts=parts, world=world)
    place = place_on(world.device, reuse=spec.placement.layout.memory.reuse_buffers)
    phases = Phases(world.device)
    profiler = stack.enter_context(_profiler(folder, spec=spec, phases=phases, world=world))

    def write(record: StepRecord) -> None:
        checkpoints.note(record)
        if log is not None:
            log.write(record)
        observe(record)

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
            phases=phases,
            profile_requested=ProfileRequest(folder.profile, world=world),
            after_step=profiler,
            efficiency=_efficiency(spec) if world.is_first else None,
        ),
        world=world,
    )
    if log is not None:
        log.close()
        _close(folder, spec=spec, state=state, started_s=started_s)
    return state


def _profiler(
    folder: RunFolder, *, spec: RunSpec, phases: Phases, world: World
) -> AbstractContextManager[Profiler]:
    profile = spec.placement.observe.profile
    return closing(Profiler(folder.traces, spec=profile, phases=phases, world=world))


def _efficiency(spec: RunSpec) -> Efficiency:
    placement = spec.placement
    return Efficiency(
        inspect(spec.identity.model),
        layout=placement.layout,
        flops_per_s=placement.observe.flops_per_s,
    )


def _observing(
    folder: RunFolder, *, spec: RunSpec, attempt: int, step: int, world: World
) -> AbstractContextManager[Callable[[StepRecord], None]]:
    return observing(
        folder,
        spec=spec,
        attempt=attempt,
        step=step,
        rank=world.rank,
        device_index=world.device.index,
        gather=partial(mesh.gather_texts, world=world),
    )


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
    parts: Parts,
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
