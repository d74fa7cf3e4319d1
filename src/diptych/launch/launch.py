"""Run a spec: start its ranks by one of the launchers, follow them, and say how they ended.

In: a run spec and the data it names. Out: the `Run` of a finished run, or an error that says how
the ranks ended and what they printed. A run that was stopped or killed goes on from its newest
checkpoint when it is launched again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from diptych.core import provenance
from diptych.core.errors import RunError
from diptych.core.records import Launched, Run, RunSpec
from diptych.launch import process
from diptych.launch.changes import tell_changes
from diptych.launch.follow import follow
from diptych.launch.job import Job, launcher
from diptych.launch.progress import Progress, make_progress
from diptych.launch.ready import (
    alone,
    check_ready,
    note_job,
    open_folder,
    take_finished,
    writing,
)
from diptych.launch.room import refusal
from diptych.launch.words import last_words
from diptych.monitor.run_folder import RunFolder


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
    finished = take_finished(folder, spec=spec)
    if finished is not None:
        return finished
    preflight, schedule_sha256 = check_ready(spec, folder=folder)
    changes = tell_changes(spec, folder=folder, schedule_sha256=schedule_sha256)
    with (
        writing(folder),
        alone(folder),
        process.stop_signals() as stops,
        make_progress(spec) as progress,
    ):
        for line in changes:
            progress.say(line)
        for check in preflight.warned:
            progress.say(f"{check.name}: {check.found}. {check.cure}")
        job, launched = _start_or_attach(spec, folder=folder, progress=progress)
        code: int | None = None
        try:
            code = follow(
                job,
                folder=folder,
                stops=stops,
                progress=progress,
                first_attempt=launched.first_attempt,
                logs=folder.path / launched.logs,
            )
        finally:
            if code is not None or not job.outlives:
                job.end()
    run = folder.read_run()
    if run is not None:
        return run
    raise _explain(code, job=job, folder=folder, stops=stops, logs=folder.path / launched.logs)


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
    logs = open_folder(spec, folder=folder)
    first_attempt = folder.count_attempts()
    kind = spec.placement.launch.kind
    job = launcher(kind).start(spec, folder=folder, logs=logs)
    launched = note_job(job, kind=kind, folder=folder, logs=logs, first_attempt=first_attempt)
    return job, launched


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
    refused = refusal(folder.path)
    if refused is not None:
        return RunError(
            f"The disk of {folder.path} takes nothing more ({refused}): run {name} has "
            "ended, and since then nothing of it could be kept",
            cure=f"Free some room, or set folders.runs to another disk; {_what_next(folder)}",
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
