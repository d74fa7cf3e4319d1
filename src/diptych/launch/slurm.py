"""Ranks on a Slurm cluster: a batch script in the run's folder, submitted, then followed.

The job is Slurm's: it goes on when this process ends, and goes on elsewhere after a lost node or a
preemption. It needs no driver; a driver only shows how it is.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from diptych.core.errors import LayoutError, RunError, nearest
from diptych.core.files import write_text
from diptych.core.records import Launched, RunSpec
from diptych.launch import slurm_client as client
from diptych.launch import slurm_script as scripts
from diptych.launch.slurm_state import JobState, cause, changes, script_words, seconds
from diptych.monitor.run_folder import RunFolder

_FIRST_LOOK_S = 0.5
_SLOWEST_LOOK_S = 15.0
_SILENCE_S = 30.0
_SEEN_WITHIN_S = 60.0
_END_WITHIN_S = 120.0
_NOTICE_S = 60
"""Slurm may warn so much earlier than asked."""


class SlurmJob:
    """A job of Slurm's, or a task of an array."""

    def __init__(self, job_id: str, *, folder: RunFolder, logs: Path, outlives: bool) -> None:
        self.job_id = job_id
        self.outlives = outlives
        self._folder = folder
        self._logs = logs
        self._state: JobState | None = None
        self._code: int | None = None
        self._by = ""
        self._news: list[str] = []
        self._asked: client.Asked | None = None
        self._next_s = self._changed_s = time.monotonic()
        self._answered_s = time.monotonic()
        self._is_silent = False
        self._ended_s: float | None = None

    def poll(self) -> int | None:
        """Return its exit code once Slurm says that it has ended for good."""
        if self._code is not None:
            return self._code
        if self._asked is None and time.monotonic() >= self._next_s:
            self._asked = client.look_later(self.job_id)
        if self._asked is not None and self._asked.has_answered():
            state, trouble = client.read_look(self._asked)
            self._asked = None
            self._take(state, trouble=trouble)
            self._next_s = time.monotonic() + self._pause_s()
        return self._code

    def news(self) -> list[str]:
        """Return what has changed: pending and why, running and where, queued again."""
        said, self._news = self._news, []
        return said

    def end(self) -> None:
        """Cancel it if it has not ended, and wait until its processes have."""
        if self._code is not None:
            return
        self._by = "this command"
        client.cancel(self.job_id)
        deadline = time.monotonic() + _END_WITHIN_S
        while self.poll() is None and time.monotonic() < deadline:
            self._next_s = min(self._next_s, time.monotonic() + _FIRST_LOOK_S)
            time.sleep(0.1)

    def why(self) -> str:
        """Say how Slurm ended it, and what its script said if that tells more."""
        if self._state is None:
            return f"Slurm no longer knows job {self.job_id}, and keeps no accounts of it"
        by = self._by or client.look_back(self.job_id)[1]
        ranks_began = any(self._logs.glob("launcher-*.log"))
        words = script_words(self.log, all_lines=not ranks_began)
        title = [f"The job's script said last ({self.log}):"] * bool(words)
        return "\n".join([cause(self._state, job_id=self.job_id, by=by), *title, *words])

    @property
    def log(self) -> Path:
        """The log of the job's script; the newest where an array's task has a number of its own."""
        own = self._logs / f"slurm-{self.job_id}.log"
        logs = sorted(self._logs.glob("slurm-*.log"), key=lambda path: path.stat().st_mtime)
        return own if own.exists() or not logs else logs[-1]

    def _take(self, state: JobState | None, *, trouble: str) -> None:
        if trouble:
            self._note_trouble(trouble)
            return
        self._note_answer()
        has_ended = state is None or state.has_ended
        if state is None:  # forgotten: it ended minutes ago
            state, self._by = client.look_back(self.job_id)
        if has_ended:
            self._code = self._judge(state)
        if state is not None:
            self._tell(state)

    def _tell(self, state: JobState) -> None:
        lines = changes(self._state, state, job_id=self.job_id)
        if lines or self._state is None:
            self._changed_s = time.monotonic()
        self._news += lines
        self._state = state
        if state.name == "PENDING" and is_asked(self._folder):
            self._by = "the request to stop, before it began"
            client.cancel(self.job_id)

    def _judge(self, state: JobState | None) -> int | None:
        """Return the exit code; on a shared disk the end of a run may show a little later."""
        if state is not None and state.has_ended and state.code:
            return state.code
        if self._folder.finished.exists():
            return 0
        self._ended_s = self._ended_s or time.monotonic()
        return 1 if time.monotonic() > self._ended_s + _SEEN_WITHIN_S else None

    def _note_trouble(self, trouble: str) -> None:
        if not self._is_silent and time.monotonic() > self._answered_s + _SILENCE_S:
            self._is_silent = True
            self._news.append(f"Slurm's controller does not answer ({trouble}); the job goes on")

    def _note_answer(self) -> None:
        if self._is_silent:
            self._news.append("Slurm's controller answers again")
        self._is_silent, self._answered_s = False, time.monotonic()

    def _pause_s(self) -> float:
        """Look often after a change and near the end, else seldom: thousands share a controller."""
        if self._folder.finished.exists() or self._ended_s is not None:
            return _FIRST_LOOK_S
        waited_s = time.monotonic() - self._changed_s
        return min(_SLOWEST_LOOK_S, max(1.0, waited_s / 20))


def check(spec: RunSpec) -> str:
    """Look for Slurm, and for what it has of what the run asks.

    Raises:
        RunError: no Slurm, or no such partition.
        LayoutError: its partition does not have what the run needs.
    """
    check_cluster(spec)
    return spec.placement.launch.slurm.partition or "the cluster's default partition"


def start(spec: RunSpec, *, folder: RunFolder, logs: Path) -> SlurmJob:
    """Submit a run.

    Raises:
        RunError: there is no Slurm here, or it does not take the job.
        LayoutError: its partition does not have what the run needs.
        ConfigError: the settings make no batch script.
    """
    project = Path.cwd()
    place = scripts.place_of_run(folder.path, logs=logs, project=project)
    text = scripts.script(spec, place=place)
    check_cluster(spec)
    for job_id in client.queued(place.job_name, project=project):
        raise RunError(
            f"Slurm job {job_id} of run {folder.path.name} waits or runs already, and was not "
            "started by this command",
            cure=f"Wait for it, or end it: scancel {job_id}",
        )
    job_id = _submit(place.path, text=text, spec=spec)
    return _job(job_id, spec=spec, folder=folder, logs=logs)


def attach(launched: Launched, *, folder: RunFolder) -> SlurmJob | None:
    """Return the job that an earlier driver submitted, or a person by hand, if it is going on.

    Raises:
        RunError: Slurm does not answer, so nobody knows.
    """
    client.need_slurm()
    known = [launched.job_id] if launched.job_id else []
    others = client.queued(scripts.job_name(folder.path.name), project=Path.cwd())
    for job_id in [*known, *others]:
        state, trouble = client.read_look(client.look_later(job_id))
        if trouble:
            raise RunError(
                f"Slurm does not say how job {job_id} of run {folder.path.name} is: {trouble}",
                cure=f"Wait until `scontrol show job {job_id}` answers, and run this again",
            )
        if state is not None and not state.has_ended:
            logs = folder.path / launched.logs
            return _job(job_id, spec=folder.read_spec(), folder=folder, logs=logs)
    return None


def cancel_pending(launched: Launched) -> bool:
    """Cancel a job that waits for nodes; one that runs heeds the request to stop.

    Raises:
        RunError: Slurm does not answer.
    """
    client.need_slurm()
    if launched.job_id is None:
        return False
    state, trouble = client.read_look(client.look_later(launched.job_id))
    if trouble:
        raise RunError(
            f"Slurm does not say how job {launched.job_id} is: {trouble}",
            cure=f"Wait until `scontrol show job {launched.job_id}` answers, and run this again",
        )
    if state is None or state.name != "PENDING":
        return False
    client.cancel(launched.job_id)
    return True


def start_array(
    specs: Sequence[RunSpec],
    *,
    folders: Sequence[RunFolder],
    logs: Sequence[Path],
    folder: Path,
    at_once: int | None = None,
) -> list[SlurmJob]:
    """Submit several runs as the tasks of one job array.

    Args:
        specs: the runs', alike in all that Slurm is asked for.
        folders: theirs.
        logs: the folders of their ranks' logs.
        folder: where the script goes, and the list of the runs beside it.
        at_once: how many of them may run at the same time; None leaves that to Slurm.

    Raises:
        RunError, LayoutError, ConfigError: as for one run; or the runs are not alike.
    """
    first = specs[0]
    _need_alike(specs)
    runs = folder / "runs.tsv"
    place = scripts.place_of_array(
        folder, runs=runs, num_runs=len(specs), at_once=at_once, project=Path.cwd()
    )
    text = scripts.script(first, place=place)
    check_cluster(first)
    folder.mkdir(parents=True, exist_ok=True)
    rows = [f"{run.path}\t{log}\n" for run, log in zip(folders, logs, strict=True)]
    write_text(runs, text="".join(rows))
    job_id = _submit(place.path, text=text, spec=first)
    return [
        _job(f"{job_id}_{number}", spec=spec, folder=run, logs=log)
        for number, (spec, run, log) in enumerate(zip(specs, folders, logs, strict=True))
    ]


def is_asked(folder: RunFolder) -> bool:
    """Whether a person asked a run to stop: a job's script signs what Slurm made it ask."""
    try:
        text = folder.stop.read_text("utf-8", errors="replace")
    except OSError:
        return False
    return not text.startswith("slurm:")


def check_cluster(spec: RunSpec) -> None:
    """Refuse what the cluster does not have, before anything is submitted.

    Raises:
        RunError: no Slurm, or no such partition.
        LayoutError: too many nodes or too long a time for the partition.
    """
    client.need_slurm()
    slurm = spec.placement.launch.slurm
    found = client.partitions()
    if not found:
        return  # some clusters hide them; sbatch has the last word
    names = slurm.partition.split(",") if slurm.partition else _default(found)
    for name in names:
        if name not in found:
            raise RunError(
                f"This cluster has no partition '{name}' (train.launch.slurm.partition). "
                f"It has: {', '.join(found)}",
                cure=nearest(name, allowed=found),
            )
    check_limits(spec, partitions=[found[name] for name in names])


def check_limits(spec: RunSpec, *, partitions: Sequence[dict[str, str]]) -> None:
    """Refuse more than any of these partitions allows, and a limit that leaves no time to train.

    Raises:
        LayoutError: too many nodes, too long a time, or too short a one.
    """
    slurm, num_nodes = spec.placement.launch.slurm, spec.placement.launch.num_nodes or 1
    limit_s = _limit(slurm.time)
    if limit_s is not None and slurm.warn_s and limit_s <= slurm.warn_s + _NOTICE_S:
        raise LayoutError(
            f"train.launch.slurm.time is {slurm.time}, and the warning comes {slurm.warn_s} s "
            f"before that, or up to {_NOTICE_S} s earlier: no time is left to train",
            cure="Raise time, or lower train.launch.slurm.warn_s (0 does without a warning)",
        )
    refusals = [_refusal(each, num_nodes=num_nodes, limit_s=limit_s) for each in partitions]
    if refusals and all(refusals):
        raise LayoutError("; ".join(refusals), cure="Name another partition, or ask for less")


def _refusal(partition: dict[str, str], *, num_nodes: int, limit_s: float | None) -> str:
    name = f"Partition {partition['PartitionName']}"
    if partition.get("State", "UP") != "UP":
        return f"{name} is {partition['State']}"
    for field, what in (("TotalNodes", "has"), ("MaxNodes", "allows a job")):
        most = partition.get(field, "")
        if most.isdigit() and num_nodes > int(most):
            return f"{name} {what} {most} nodes, and train.launch.num_nodes is {num_nodes}"
    most_s = seconds(partition.get("MaxTime", "UNLIMITED"))
    if limit_s is not None and most_s is not None and limit_s > most_s:
        return f"{name} allows {partition['MaxTime']}, and train.launch.slurm.time is longer"
    return ""


def _default(partitions: dict[str, dict[str, str]]) -> list[str]:
    return [name for name, each in partitions.items() if each.get("Default") == "YES"]


def _limit(time: str | None) -> float | None:
    try:
        return None if time is None else seconds(time)
    except ValueError:
        raise LayoutError(
            f"train.launch.slurm.time is '{time}'",
            allowed="Slurm's forms: minutes, hours:minutes:seconds, days-hours:minutes:seconds",
            cure='Write, for example, time: "04:00:00" (with quotation marks)',
        ) from None


def _need_alike(specs: Sequence[RunSpec]) -> None:
    asked = [
        (
            spec.placement.launch,
            spec.placement.layout.world_size,
            spec.placement.layout.device,
            spec.placement.threads_per_rank,
        )
        for spec in specs
    ]
    if any(each != asked[0] for each in asked):
        raise RunError(
            "The runs of a sweep ask Slurm for different things",
            allowed="One array's tasks have the same nodes, ranks and train.launch",
            cure="Sweep over settings of the training, or launch these runs one by one",
        )


def _submit(path: Path, *, text: str, spec: RunSpec) -> str:
    write_text(path, text=text)
    path.chmod(0o755)
    return client.submit(path, set_here=spec.placement.launch.slurm.model_dump())


def _job(job_id: str, *, spec: RunSpec, folder: RunFolder, logs: Path) -> SlurmJob:
    outlives = not spec.placement.launch.slurm.cancel_on_interrupt
    return SlurmJob(job_id, folder=folder, logs=logs, outlives=outlives)
