"""Follow a job from the run's folder: its steps, what its scheduler says, requests to stop."""

from __future__ import annotations

import time

from diptych.launch.job import Job
from diptych.launch.process import StopSignals
from diptych.launch.progress import Progress
from diptych.monitor.run_folder import RunFolder, StepTail

_POLL_S = 0.1
_NEWS_EVERY_S = 1.0
_STOP_GRACE_S = 60.0


def follow(
    job: Job, *, folder: RunFolder, stops: StopSignals, progress: Progress, from_step: int
) -> int | None:
    """Show progress until the job ends; a stop signal lets the ranks save, a second kills.

    Returns:
        The exit code, -1 where the job is to be killed, None where it is left to go on alone.
    """
    tail = StepTail(folder.steps)
    deadline: float | None = None
    next_news = 0.0
    while True:
        code = job.poll()
        for record in tail.read():
            # A resumed log is cut, and what it holds up to there was shown before.
            if record.step > from_step:
                progress.show(record)
        if time.monotonic() >= next_news or code is not None:
            next_news = time.monotonic() + _NEWS_EVERY_S
            for line in job.news():
                progress.say(line)
        if code is not None:
            return code
        if stops.count and job.outlives:
            return None
        if stops.count and deadline is None:
            progress.say(
                f"{stops.name}: the ranks save a checkpoint and stop; once more to kill them"
            )
            folder.stop.touch()
            deadline = time.monotonic() + _STOP_GRACE_S
        if deadline is not None and (stops.count > 1 or time.monotonic() > deadline):
            return -1
        time.sleep(_POLL_S)
