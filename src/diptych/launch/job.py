"""What every way of starting ranks gives back: a job that is asked how it is, and ended."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Protocol, cast

from diptych.core.records import Launched, LaunchKind, RunSpec
from diptych.monitor.run_folder import RunFolder


class Job(Protocol):
    """The ranks of a run, wherever they are.

    Attributes:
        outlives: whether it goes on without this process: a stop signal then leaves it alone.
    """

    outlives: bool

    @property
    def job_id(self) -> str | None:
        """The scheduler's name of it."""
        ...

    def poll(self) -> int | None:
        """Return the exit code once all ranks have ended, None before."""
        ...

    def news(self) -> list[str]:
        """Return what a person should know of it since the last look: waiting, started, moved."""
        ...

    def end(self) -> None:
        """End what is left of it, and wait for that; nothing after it has ended."""
        ...

    def why(self) -> str:
        """Return why it ended as the scheduler knows it; empty where only the ranks can tell."""
        ...


class Launcher(Protocol):
    """One way of starting ranks: a module's functions."""

    def check(self, spec: RunSpec) -> str:
        """Look for what would start the ranks; returns what was found.

        Raises:
            DiptychError: it is not there, or could not start this run.
        """
        ...

    def start(self, spec: RunSpec, *, folder: RunFolder, logs: Path) -> Job:
        """Start a run's ranks, each of which writes its log into `logs`.

        Raises:
            RunError, LayoutError: what it needs is not there; nothing is left behind.
        """
        ...

    def cancel_pending(self, launched: Launched) -> bool:
        """Take a job back that still waits for a place; returns whether there was one.

        A job that runs is left alone: its ranks heed the file `stop`.

        Raises:
            RunError: the scheduler does not answer.
        """
        ...

    def attach(self, launched: Launched, *, folder: RunFolder) -> Job | None:
        """Return the job that an earlier driver started, if it is still going on."""
        ...


def launcher(kind: LaunchKind) -> Launcher:
    """Return the module that starts ranks in this way."""
    return cast(Launcher, import_module(f"diptych.launch.{kind}"))
