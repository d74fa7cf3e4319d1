"""Ranks on this machine: torch elastic starts them as children of this process.

They end with it, however it ends.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from diptych.core.records import Launched, RunSpec
from diptych.launch import process
from diptych.launch.elastic import WorkerMode, elastic_command
from diptych.launch.network import loopback, python_path, rank_environment
from diptych.monitor.run_folder import RunFolder

_KILL_GRACE_S = 5.0


class LocalJob:
    """A child process with ranks below it."""

    job_id: str | None = None
    outlives = False

    def __init__(self, child: process.Child, *, meeting: tempfile.TemporaryDirectory[str]) -> None:
        self._child = child
        self._meeting = meeting

    def poll(self) -> int | None:
        """Return torch elastic's exit code."""
        return self._child.poll()

    def news(self) -> list[str]:
        """Nothing happens to it that its ranks do not say."""
        return []

    def end(self) -> None:
        """End the child and its ranks."""
        process.end(self._child, grace_s=_KILL_GRACE_S)
        self._meeting.cleanup()

    def why(self) -> str:
        """Only the ranks can tell."""
        return ""


def check(spec: RunSpec) -> str:
    """This machine is there; what it lacks, the checks of the machine say."""
    return f"{spec.placement.layout.world_size} ranks on this machine"


def start(spec: RunSpec, *, folder: RunFolder, logs: Path, mode: WorkerMode = "train") -> LocalJob:
    """Start the ranks as children."""
    meeting = tempfile.TemporaryDirectory(prefix="diptych-")
    child = process.start(
        command(spec, folder=folder, logs=logs, meeting=Path(meeting.name) / "store", mode=mode),
        env=environment(spec, logs=logs),
        log=logs / "launcher.log",
    )
    return LocalJob(child, meeting=meeting)


def attach(launched: Launched, *, folder: RunFolder) -> LocalJob | None:
    """Ranks of this machine end with the process that started them."""
    return None


def cancel_pending(launched: Launched) -> bool:
    """Nothing of this machine waits for a place."""
    return False


def command(
    spec: RunSpec, *, folder: RunFolder, logs: Path, meeting: Path, mode: WorkerMode = "train"
) -> list[str]:
    """Return torch elastic's command; ranks meet through a file."""
    return elastic_command(
        folder.path,
        logs=logs,
        num_nodes="1",
        ranks_per_node=spec.placement.layout.world_size,
        # What a preflight finds once, it finds again.
        max_restarts=spec.placement.max_restarts if mode == "train" else 0,
        mode=mode,
        meeting={
            # Through a file: as a server, torch's store would listen on every address.
            "rdzv-backend": "c10d",
            "rdzv-conf": "store_type=file",
            "rdzv-endpoint": str(meeting),
            "rdzv-id": spec.run_id,
            "local-addr": "127.0.0.1",
        },
    )


def environment(spec: RunSpec, *, logs: Path) -> dict[str, str]:
    """Return the whole environment of the ranks."""
    return {
        **os.environ,
        "PYTHONPATH": python_path(),
        **loopback(),
        **rank_environment(spec, logs=logs),
    }
