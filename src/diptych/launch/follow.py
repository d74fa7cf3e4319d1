"""Follow a job from the run's folder: steps, ranks' warnings, its scheduler, requests to stop."""

from __future__ import annotations

import time
from pathlib import Path

from diptych.launch.job import Job
from diptych.launch.process import StopSignals
from diptych.launch.progress import Progress
from diptych.launch.room import refusal
from diptych.monitor.log_tail import LogTail, Warnings
from diptych.monitor.run_folder import RunFolder, StepTail

FAILED = -2
_POLL_S = 0.1
_NEWS_EVERY_S = 1.0
_LOOK_AT_DISK_EVERY_S = 10.0
_STOP_GRACE_S = 60.0


def follow(
    job: Job,
    *,
    folder: RunFolder,
    stops: StopSignals,
    progress: Progress,
    first_attempt: int,
    logs: Path,
) -> int | None:
    """Show progress until the job ends; a stop signal lets the ranks save, a second kills.

    Args:
        job: what was started.
        folder: the run's.
        stops: the stop signals so far.
        progress: shows what is found.
        first_attempt: the number of the first attempt that is this job's; what earlier ones have
            left in the log is not shown.
        logs: of the ranks, whose warnings are shown once.

    Returns:
        The exit code; -1 where the job is to be killed, FAILED where starting its ranks again
        would not help, None where it is left to go on alone.
    """
    news = _News(job, folder=folder, first_attempt=first_attempt, logs=logs)
    tail = StepTail(folder.steps)
    asked = _Stop(stops, folder=folder, progress=progress)
    while True:
        code = job.poll()
        records = [record for record in tail.read() if record.attempt >= first_attempt]
        for line in news.read(has_records=bool(records), last=code is not None):
            progress.say(line)
        for record in records:
            progress.show(record)
        if code is not None:
            return code
        if news.has_failed:
            return FAILED
        if stops.count and job.outlives:
            return None
        if asked.is_over():
            return -1
        time.sleep(_POLL_S)


class _Stop:
    """A request to stop: passed on once, and given so long."""

    def __init__(self, stops: StopSignals, *, folder: RunFolder, progress: Progress) -> None:
        self._stops = stops
        self._folder = folder
        self._progress = progress
        self._deadline: float | None = None

    def is_over(self) -> bool:
        """Pass a request on; whether the ranks have had their time, or were asked twice."""
        if self._stops.count and self._deadline is None:
            self._progress.say(
                f"{self._stops.name}: the ranks save a checkpoint and stop; once more to kill them"
            )
            self._deadline = time.monotonic() + (_STOP_GRACE_S if self._ask() else 0.0)
        if self._deadline is None:
            return False
        return self._stops.count > 1 or time.monotonic() > self._deadline

    def _ask(self) -> bool:
        """Leave a file that ranks look for; whether there is one. Else they could save nothing."""
        try:
            self._folder.stop.touch()
        except OSError as error:
            self._progress.say(f"{self._folder.path} takes no file ({error.strerror})")
            return False
        return True


class _News:
    """What happened to a job and its ranks since the last look, in lines for people."""

    def __init__(self, job: Job, *, folder: RunFolder, first_attempt: int, logs: Path) -> None:
        self._job = job
        self._folder = folder
        self._first = first_attempt
        self._num_told = first_attempt
        self._warnings = Warnings(LogTail(logs, begin="now"))
        self._next_s = 0.0
        self._next_look_s = 0.0
        self._refused: str | None = None
        self._before = folder.read_status()

    @property
    def has_failed(self) -> bool:
        """Whether the ranks said that they cannot do it, however often they are started."""
        status = self._folder.read_status()
        return status != self._before and status.get("state") == "failed" and "error" in status

    def read(self, *, has_records: bool, last: bool) -> list[str]:
        """Return what is new: now and then, at the end, and how an attempt began before its steps.

        Args:
            has_records: whether there are steps to show.
            last: whether the job has ended.
        """
        is_due = last or time.monotonic() >= self._next_s
        if not is_due:
            return self._tell_attempts() if has_records else []
        self._next_s = time.monotonic() + _NEWS_EVERY_S
        return [
            *self._job.news(),
            *self._tell_attempts(),
            *self._warnings.read(last=last),
            *self._tell_disk(),
        ]

    def _tell_disk(self) -> list[str]:
        """Say once that the run's disk takes nothing more, and once that it does again."""
        if time.monotonic() < self._next_look_s:
            return []
        self._next_look_s = time.monotonic() + _LOOK_AT_DISK_EVERY_S
        before, self._refused = self._refused, refusal(self._folder.path)
        if self._refused and not before:
            return [
                f"The disk of {self._folder.path} takes nothing more ({self._refused}): steps wait "
                "in memory, and no checkpoint is kept. Free some room"
            ]
        return (
            [f"The disk of {self._folder.path} takes files again"]
            if before and not self._refused
            else []
        )

    def _tell_attempts(self) -> list[str]:
        lines: list[str] = []
        attempts = self._folder.read_attempts()
        for attempt in attempts[self._num_told :]:
            lines += attempt.get("passed_over", [])
            lines += self._tell_begin(attempt["attempt"], step=attempt["from_step"])
            if attempt["attempt"] > self._first:
                lines += [f"  {line}" for line in attempt["changes"]]
        self._num_told = len(attempts)
        return lines

    def _tell_begin(self, number: int, *, step: int) -> list[str]:
        where = f"step {step}, the newest checkpoint" if step else "the beginning"
        if number > self._first:
            return [f"the ranks were started again: attempt {number + 1}, from {where}"]
        return [f"goes on from {where}"] if step else []
