"""Run a spec: start its ranks by one of the launchers, follow them, and say how they ended.

In: a run spec and the data it names. Out: the `Run` of a finished run, or an error that says how
the ranks ended and what they printed. A run that was stopped or killed goes on from its newest
checkpoint when it is launched again.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from diptych.core import provenance
from diptych.core.errors import RunError
from diptych.core.records import Launched, Run, RunSpec
from diptych.data.costs import load_costs
from diptych.data.schedule.assign import assign
from diptych.data.schedule.schedule import Schedule
from diptych.data.shards.manifest import load_manifest
from diptych.launch import process
from diptych.launch.changes import tell_changes
from diptych.launch.follow import follow
from diptych.launch.job import Job, Launcher
from diptych.launch.preflight import check_machine
from diptych.launch.progress import Progress, make_progress
from diptych.launch.words import last_words
from diptych.model.inspect import inspect
from diptych.monitor.run_folder import RunFolder

_LOG = logging.getLogger(__name__)
_MODULES = {
    "local": "diptych.launch.local",
    "nodes": "diptych.launch.nodes",
    "ray": "diptych.launch.ray",
    "slurm": "diptych.launch.slurm",
}


def launch(run_spec: RunSpec, sample_costs: Path, shards: Path, runs: str) -> Run:
    """Train a run spec to its end.

    Args:
        run_spec: What to run and where.
        sample_costs: The folder of costs; its place is in the spec, it is named here as an input.
        shards: The folder of shards; likewise.
        runs: The folder that holds a folder per run.

    Raises:
        ConfigError, DataError: no schedule can be made of this data with these settings.
        LayoutError: this machine lacks what the layout needs.
        RunError: the ranks failed, or were stopped before the last step.
    """
    spec = run_spec.model_copy(update={"provenance": provenance.read()})
    folder = RunFolder(Path(runs) / spec.run_id)
    finished = _finished(folder, spec=spec)
    if finished is not None:
        return finished
    check_machine(
        spec.placement.layout,
        num_parameters=_num_parameters(spec),
        optimizer=spec.identity.optimizer.kind,
    )
    schedule_sha256 = _check_schedule(spec)
    changes = tell_changes(spec, folder=folder, schedule_sha256=schedule_sha256)
    with (
        _writing(folder),
        _alone(folder),
        process.stop_signals() as stops,
        make_progress(spec) as progress,
    ):
        for line in changes:
            progress.say(line)
        job, launched = _start_or_attach(spec, folder=folder, progress=progress)
        code: int | None = None
        try:
            code = follow(
                job,
                folder=folder,
                stops=stops,
                progress=progress,
                first_attempt=launched.first_attempt,
            )
        finally:
            if code is not None or not job.outlives:
                job.end()
    run = folder.read_run()
    if run is not None:
        return run
    raise _explain(code, job=job, folder=folder, stops=stops, logs=folder.path / launched.logs)


def launcher(kind: str) -> Launcher:
    """Return the module that starts ranks in this way.

    Raises:
        RunError: it is not built yet.
    """
    if kind not in _MODULES:
        raise RunError(
            f"train.launch.kind is {kind}, which is not built yet",
            allowed=", ".join(_MODULES),
            cure="Set train.launch.kind: local",
        )
    return cast(Launcher, import_module(_MODULES[kind]))


def _start_or_attach(
    spec: RunSpec, *, folder: RunFolder, progress: Progress
) -> tuple[Job, Launched]:
    """Follow what an earlier driver started, where that goes on; else start the ranks."""
    former = folder.read_launched()
    if former is not None:
        job = launcher(former.kind).attach(former, folder=folder)
        if job is not None:
            progress.say(f"follows {former.kind} job {former.job_id}, which goes on")
            return job, former
    folder.stop.unlink(missing_ok=True)
    folder.write_spec(spec)
    folder.write_status("starting", num_steps=spec.identity.num_steps)
    number = folder.count_attempts()
    logs = folder.logs / f"attempt-{number:03d}"
    logs.mkdir(parents=True, exist_ok=True)
    kind = spec.placement.launch.kind
    job = launcher(kind).start(spec, folder=folder, logs=logs)
    launched = Launched(
        kind=kind,
        job_id=job.job_id,
        host=socket.gethostname(),
        pid=os.getpid(),
        started_s=round(time.time(), 3),
        logs=logs.relative_to(folder.path).as_posix(),
        first_attempt=number,
    )
    folder.write_launched(launched)
    return job, launched


def _num_parameters(spec: RunSpec) -> int | None:
    """Count the model's parameters where a disk must hold them; torch takes seconds to import."""
    zero = spec.placement.layout.zero
    if "nvme" not in (zero.optimizer.to, zero.parameters.to):
        return None
    return inspect(spec.identity.model).num_parameters


def _check_schedule(spec: RunSpec) -> str:
    """Make the schedule once and deal out a batch, so that what cannot work starts no rank.

    Returns:
        The schedule's hash.
    """
    identity, placement = spec.identity, spec.placement
    costs = load_costs(
        Path(placement.sample_costs),
        manifest=load_manifest(Path(placement.manifest)),
        split="train",
        processor_sha256=identity.processor_sha256,
    )
    schedule = Schedule(costs, buckets=identity.buckets, spec=identity.schedule)
    rows = schedule.rows(0, 0)
    assign(
        rows,
        costs=schedule.weigh(rows),
        world_size=placement.layout.world_size,
        rank=0,
        micro_batch=placement.layout.micro_batch,
        group=schedule.group,
    )
    return schedule.sha256


@contextmanager
def _writing(folder: RunFolder) -> Iterator[None]:
    """Turn a disk's refusal to take the run's files into an error for people."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EROFS, errno.EACCES, errno.ENOSPC, errno.EDQUOT, errno.EIO):
            raise
        raise RunError(
            f"The run's folder {folder.path} cannot be written to ({error.strerror})",
            cure="Free some room or make it writable, or set folders.runs to another disk",
        ) from error


@contextmanager
def _alone(folder: RunFolder) -> Iterator[None]:
    """Hold the run's lock, so that two launchers never write one run."""
    folder.path.mkdir(parents=True, exist_ok=True)
    with (folder.path / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(
                f"Run {folder.path.name} is being trained by another process",
                cure=f"Wait for it, or stop it: touch {folder.stop}",
            ) from None
        yield


def _finished(folder: RunFolder, *, spec: RunSpec) -> Run | None:
    """Return a finished run if the same sources trained it; else move it aside."""
    run = folder.read_run()
    if run is None:
        return None
    if not (Path(run.checkpoint) / "checksums.json").is_file():
        _LOG.warning("the last checkpoint of run %s is gone: its last steps run again", run.run_id)
        folder.finished.unlink()
        return None
    if run.source_sha256 == spec.provenance.source_sha256:
        layout = folder.read_spec().placement.layout
        how = f"{layout.engine} on {layout.world_size} x {layout.device}"
        _LOG.info("run %s was finished with %s: nothing to train", run.run_id, how)
        return run
    number = 1
    while (aside := folder.path.with_name(f"{folder.path.name}.old-{number}")).exists():
        number += 1
    folder.path.rename(aside)
    _LOG.info("the training code has changed: training anew, the former run is in %s", aside)
    return None


def _explain(
    code: int | None, *, job: Job, folder: RunFolder, stops: process.StopSignals, logs: Path
) -> RunError:
    status = folder.read_status()
    name = folder.path.name
    place = f"step {status.get('step', 0)} of {status.get('num_steps', '?')}"
    if code is None:
        return RunError(
            f"Run {name} is no longer followed ({stops.name}); job {job.job_id} goes on",
            cure=f"The same command follows it again; kedro stop {name} ends it after a checkpoint",
        )
    if stops.count or status.get("state") == "stopped":
        is_saved = status.get("state") == "stopped" and folder.newest_checkpoint()
        saved = "saved" if is_saved else "ended before there was anything to save"
        if status.get("state") != "stopped":
            saved = "killed before it could save"
        why = stops.name or "on request"
        return RunError(
            f"Run {name} was stopped ({why}) and {saved} at {place}",
            cure=_what_next(folder).capitalize(),
        )
    if "error" in status:
        return RunError(
            f"Run {name} failed after {place}.\n{status['error']}",
            cure=f"\nAll its ranks printed is in {logs}",
        )
    folder.write_status("failed", **_numbers(status), exit_code=code)
    said = "\n".join(filter(None, [job.why(), last_words(logs)]))
    return RunError(
        f"The ranks of run {name} failed (exit code {code}) after {place}.\n{said}",
        cure=f"\nAll they printed is in {logs}; {_what_next(folder)}",
    )


def _numbers(status: dict[str, Any]) -> dict[str, Any]:
    return {name: status[name] for name in ("step", "num_steps") if name in status}


def _what_next(folder: RunFolder) -> str:
    if folder.newest_checkpoint():
        return "the same command goes on from its newest checkpoint"
    return "there is no checkpoint yet, so the same command begins anew"
