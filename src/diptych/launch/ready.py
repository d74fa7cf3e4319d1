"""Before a run's ranks start: what is finished is taken, the rest checked, and its folder held.

In: a run spec and its folder. Out: a folder that is ready for a launcher. Runs launched alone and
as the tasks of an array go the same way.
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
from pathlib import Path

from diptych.core.errors import RunError
from diptych.core.records import Launched, LaunchKind, Preflight, Run, RunSpec
from diptych.data.costs import load_costs
from diptych.data.schedule.assign import assign
from diptych.data.schedule.schedule import Schedule
from diptych.data.shards.manifest import load_manifest
from diptych.launch.checks import check_run, refuse_failed
from diptych.launch.corpus import Depth
from diptych.launch.job import Job
from diptych.launch.preflight import check_machine
from diptych.model.inspect import inspect
from diptych.monitor.run_folder import RunFolder

_LOG = logging.getLogger(__name__)


def take_finished(folder: RunFolder, *, spec: RunSpec) -> Run | None:
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


def check_ready(spec: RunSpec, *, folder: RunFolder) -> tuple[Preflight, str]:
    """Look at what can be said before any rank starts.

    Returns:
        What was found, and the schedule's hash.

    Raises:
        ConfigError, DataError: no schedule can be made of this data with these settings.
        LayoutError: this machine lacks what the run needs.
    """
    check_machine(
        spec.placement.layout,
        num_parameters=_num_parameters(spec),
        optimizer=spec.identity.optimizer.kind,
    )
    schedule_sha256 = check_schedule(spec)
    preflight = check_run(spec, folder=folder, depth=Depth())
    refuse_failed(preflight)
    return preflight, schedule_sha256


def check_schedule(spec: RunSpec) -> str:
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


def _num_parameters(spec: RunSpec) -> int | None:
    """Count the model's parameters where a disk must hold them; torch takes seconds to import."""
    zero = spec.placement.layout.zero
    if "nvme" not in (zero.optimizer.to, zero.parameters.to):
        return None
    return inspect(spec.identity.model).num_parameters


@contextmanager
def writing(folder: RunFolder) -> Iterator[None]:
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
def alone(folder: RunFolder) -> Iterator[None]:
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


def open_folder(spec: RunSpec, *, folder: RunFolder) -> Path:
    """Write what ranks read, drop what an earlier job was asked, and make a folder for their logs.

    Returns:
        The folder of logs.
    """
    folder.stop.unlink(missing_ok=True)
    folder.write_spec(spec)
    former = folder.read_ending()
    folder.write_status("starting", num_steps=spec.identity.num_steps, former=former)
    logs = folder.logs / f"attempt-{folder.count_attempts():03d}"
    logs.mkdir(parents=True, exist_ok=True)
    return logs


def note_job(
    job: Job, *, kind: LaunchKind, folder: RunFolder, logs: Path, first_attempt: int
) -> Launched:
    """Write down what was started, for whoever follows it later.

    Args:
        job: what was started.
        kind: by which launcher.
        folder: the run's.
        logs: the ranks'.
        first_attempt: the number that the job's first attempt will have.
    """
    launched = Launched(
        kind=kind,
        job_id=job.job_id,
        host=socket.gethostname(),
        pid=os.getpid(),
        started_s=round(time.time(), 3),
        logs=logs.relative_to(folder.path).as_posix(),
        first_attempt=first_attempt,
    )
    folder.write_launched(launched)
    return launched
