"""Runs that differ in a few settings, launched together: the tasks of one Slurm job array.

In: run specs. Out: nothing but the runs' folders, each as `launch` would have left it. A run that
is finished is taken, one that an earlier driver submitted is followed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from diptych.core import provenance
from diptych.core.records import RunSpec
from diptych.launch import process, slurm
from diptych.launch.ready import alone, check_ready, note_job, open_folder, take_finished
from diptych.monitor.run_folder import RunFolder, StepTail

_POLL_S = 0.2
_STEPS_EVERY_S = 30.0


@dataclass
class _Task:
    spec: RunSpec
    folder: RunFolder
    job: slurm.SlurmJob
    tail: StepTail
    code: int | None = None
    step: int = 0

    @property
    def name(self) -> str:
        return self.folder.path.name


def launch_array(
    specs: Sequence[RunSpec], *, runs: Path, folder: Path, at_once: int | None = None
) -> bool:
    """Train runs as the tasks of one array, and follow them until all have ended.

    Args:
        specs: the runs'.
        runs: the folder that holds a folder per run.
        folder: where the array's script goes.
        at_once: how many tasks may run at the same time; None leaves that to Slurm.

    Returns:
        Whether all have ended; not where Ctrl-C has left them to go on.

    Raises:
        ConfigError, DataError, LayoutError, RunError: as for one run; nothing is submitted then.
    """
    here = provenance.read()
    specs = [spec.model_copy(update={"provenance": here}) for spec in specs]
    pairs = [(spec, RunFolder(runs / spec.run_id)) for spec in specs]
    left = [pair for pair in pairs if take_finished(pair[1], spec=pair[0]) is None]
    with ExitStack() as stack:
        for _, each in left:
            stack.enter_context(alone(each))
        stops = stack.enter_context(process.stop_signals())
        tasks = _attach(left)
        followed = {task.name for task in tasks}
        new = [pair for pair in left if pair[1].path.name not in followed]
        tasks += _submit(new, folder=folder, at_once=at_once)
        return _follow(tasks, stops=stops)


def _attach(left: Sequence[tuple[RunSpec, RunFolder]]) -> list[_Task]:
    tasks = []
    for spec, folder in left:
        launched = folder.read_launched()
        if launched is None or launched.kind != "slurm":
            continue
        job = slurm.attach(launched, folder=folder)
        if job is not None:
            _say(f"run {spec.run_id}: follows slurm job {job.job_id}, which goes on")
            tasks.append(_Task(spec, folder, job, StepTail(folder.steps)))
    return tasks


def _submit(
    left: Sequence[tuple[RunSpec, RunFolder]], *, folder: Path, at_once: int | None
) -> list[_Task]:
    if not left:
        return []
    specs, folders = [spec for spec, _ in left], [each for _, each in left]
    for spec, each in left:
        preflight, _ = check_ready(spec, folder=each)
        for check in preflight.warned:
            _say(f"run {spec.run_id}: {check.name}: {check.found}. {check.cure}")
    logs = [open_folder(spec, folder=each) for spec, each in left]
    firsts = [each.count_attempts() for each in folders]
    jobs = slurm.start_array(specs, folders=folders, logs=logs, folder=folder, at_once=at_once)
    for job, each, log, first in zip(jobs, folders, logs, firsts, strict=True):
        note_job(job, kind="slurm", folder=each, logs=log, first_attempt=first)
    return [
        _Task(spec, each, job, StepTail(each.steps))
        for spec, each, job in zip(specs, folders, jobs, strict=True)
    ]


def _follow(tasks: Sequence[_Task], *, stops: process.StopSignals) -> bool:
    """Follow the tasks; a stop signal leaves them alone, or has them save and cancels them."""
    num_heeded, next_steps = 0, time.monotonic() + _STEPS_EVERY_S
    while True:
        for task in tasks:
            if task.code is None:
                _look(task)
        going = [task for task in tasks if task.code is None]
        if not going:
            return True
        if stops.count > num_heeded:
            if all(task.job.outlives for task in going):
                _say(f"{stops.name}: the jobs go on; the same command follows them again")
                return False
            num_heeded = stops.count
            _stop(going, stops=stops)
        if time.monotonic() >= next_steps:
            next_steps = time.monotonic() + _STEPS_EVERY_S
            _say("; ".join(_place(task) for task in going))
        time.sleep(_POLL_S)


def _stop(going: Sequence[_Task], *, stops: process.StopSignals) -> None:
    if stops.count == 1:
        _say(f"{stops.name}: the ranks save a checkpoint and stop; once more to cancel them")
    for task in going:
        if stops.count > 1:
            task.job.end()
        else:
            task.folder.stop.touch()


def _look(task: _Task) -> None:
    task.code = task.job.poll()
    for record in task.tail.read():
        task.step = record.step
    for line in task.job.news():
        _say(f"run {task.name}: {line}")
    if task.code is None:
        return
    if task.folder.read_run() is not None:
        _say(f"run {task.name}: finished")
        return
    if task.folder.read_status().get("state") != "stopped":
        task.folder.write_status("failed", step=task.step, exit_code=task.code)
    _say(f"run {task.name}: {task.job.why()}")


def _place(task: _Task) -> str:
    return f"run {task.name}: step {task.step}/{task.spec.identity.num_steps}"


def _say(text: str) -> None:
    if text:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
