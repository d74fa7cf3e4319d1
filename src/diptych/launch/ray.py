"""Ranks on a Ray cluster: a child of this process has Ray Train start and follow them.

In: a run's spec. Out: a job. Ray is not imported here: `ray_driver` is the child, `ray_ranks` what
runs in the cluster's own processes. The child ends with this process, a local cluster with it.
"""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from pathlib import Path

import psutil

from diptych.core.errors import ConfigError
from diptych.core.ray import check_ray, local_variables, ray_folder
from diptych.core.records import Launched, RunSpec
from diptych.launch import process
from diptych.launch.network import python_path
from diptych.launch.notes import NoteTail
from diptych.monitor.run_folder import RunFolder

_KILL_GRACE_S = 10.0
_TRAIN_VARIABLES = {
    "RAY_TRAIN_V2_ENABLED": "1",
    # How often ranks are asked whether they live.
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
}


class RayJob:
    """A child process that is a driver of a Ray cluster."""

    job_id: str | None = None
    outlives = False

    def __init__(self, child: process.Child, *, logs: Path, stack: ExitStack) -> None:
        self._child = child
        self._notes = NoteTail(logs)
        self._stack = stack
        self._family: list[psutil.Process] = []

    def poll(self) -> int | None:
        """Return the child's exit code."""
        return self._child.poll()

    def news(self) -> list[str]:
        """Return what Ray did: where ranks were started, which of them were started again."""
        if self._child.poll() is None:
            # Noted while there is a parent to find them by.
            self._family = process.descendants(self._child.pid)
        return [note.text for note in self._notes.read() if note.kind == "news"]

    def end(self) -> None:
        """End the child and what it has on this machine; a running cluster ends its part of it."""
        process.end(self._child, grace_s=_KILL_GRACE_S)
        for member in self._family:
            if member.is_running():
                member.kill()
        psutil.wait_procs(self._family, timeout=_KILL_GRACE_S)
        self._stack.close()

    def why(self) -> str:
        """Return Ray's reason, empty where a rank's end is the reason."""
        reasons = [note.text for note in self._notes.read_all() if note.kind == "why"]
        return reasons[-1] if reasons else ""


def check(spec: RunSpec) -> str:
    """Look whether Ray is installed, and a cluster that is named answers.

    Raises:
        RunError: one of the two is not so.
        ConfigError: the run is to go on with fewer nodes.
    """
    launch = spec.placement.launch
    if launch.min_nodes is not None and launch.min_nodes < (launch.num_nodes or 1):
        raise ConfigError(
            f"train.launch.min_nodes is {launch.min_nodes}, and on Ray a run does not go on with "
            "fewer nodes yet",
            cure="Set train.launch.min_nodes to null: ranks then wait for another node",
        )
    address = spec.placement.launch.ray.address
    check_ray(address)
    return address or "a cluster of this machine's own"


def start(spec: RunSpec, *, folder: RunFolder, logs: Path) -> RayJob:
    """Start the child."""
    address = spec.placement.launch.ray.address
    check_ray(address)
    with ExitStack() as stack:
        command = [sys.executable, "-m", "diptych.launch.ray_driver", str(folder.path), str(logs)]
        if address is None:
            command.append(str(stack.enter_context(ray_folder())))
        child = process.start(command, env=environment(address=address), log=logs / "launcher.log")
        return RayJob(child, logs=logs, stack=stack.pop_all())


def attach(launched: Launched, *, folder: RunFolder) -> RayJob | None:
    """The driver of a Ray job ends with the process that started it, and the job with it."""
    return None


def cancel_pending(launched: Launched) -> bool:
    """Ranks that wait for room heed the request to stop by themselves."""
    return False


def environment(*, address: str | None) -> dict[str, str]:
    """Return the child's environment; a cluster's processes have their own."""
    private = local_variables() if address is None else {"RAY_USAGE_STATS_ENABLED": "0"}
    # Nobody drains a cluster of one machine: no process has to watch for that.
    watches = {} if address else {"RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0"}
    return {
        **private,
        **_TRAIN_VARIABLES,
        **watches,
        **os.environ,
        "PYTHONPATH": python_path(),
        "OMP_NUM_THREADS": "1",
    }
