"""The child of `launch/ray.py`: a driver of a Ray cluster that has Ray Train run the ranks.

`python -m diptych.launch.ray_driver <run> <logs> [<folder>]`; with a folder it starts a local
cluster, whose files lie there. On SIGTERM, or when its parent dies, the ranks save and stop.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from diptych.core.errors import RunError
from diptych.core.ray import connected
from diptych.core.records import RunSpec
from diptych.launch.network import python_path, rank_environment
from diptych.launch.notes import write_note
from diptych.launch.process import StopSignals, stop_signals
from diptych.launch.words import how_ended
from diptych.monitor.run_folder import RunFolder

_POLL_S = 0.2
_CONNECT_S = 120.0
_STOP_GRACE_S = 60.0


def main(arguments: list[str] | None = None) -> int:
    """Train a run on Ray; returns the exit code."""
    parser = argparse.ArgumentParser(prog="diptych.launch.ray_driver", description=__doc__)
    parser.add_argument("run", type=Path, help="the run's folder")
    parser.add_argument("logs", type=Path, help="the folder of its logs")
    parser.add_argument("folder", type=Path, nargs="?", help="of a local cluster's files")
    options = parser.parse_args(arguments)
    folder = RunFolder(options.run)
    spec, logs = folder.read_spec(), options.logs.absolute()
    ray = spec.placement.launch.ray
    watch = _limit_wait(logs, address=ray.address)
    try:
        with connected(ray.address, folder=options.folder, runtime_env=ray.runtime_env):
            watch.cancel()
            if options.folder is not None:
                check_room(spec, have=_total())
            training = _Training(spec, folder=folder, logs=logs)
            with stop_signals() as stops:
                return training.follow(stops)
    except RunError as error:
        write_note(logs, "why", str(error))
        return 1
    finally:
        if options.folder is not None:
            # Whoever made it may have been killed.
            shutil.rmtree(options.folder, ignore_errors=True)


class _Training:
    """Ray Train's trainer in a thread, so that this one can be asked to stop."""

    def __init__(self, spec: RunSpec, *, folder: RunFolder, logs: Path) -> None:
        self._spec = spec
        self._folder = folder
        self._logs = logs
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def follow(self, stops: StopSignals) -> int:
        """Wait for the ranks; a signal has them save.

        A second one means nothing: the kernel sends one for every thread of a parent that dies.
        """
        self._thread.start()
        deadline = math.inf
        while self._thread.is_alive():
            self._thread.join(_POLL_S)
            if stops.count and deadline == math.inf:
                # Asked once: the ranks remove the file when they have saved.
                self._folder.stop.touch()
                deadline = time.monotonic() + _STOP_GRACE_S
            waits_for_room = self._folder.stop.exists() and not self._has_begun()
            if waits_for_room or time.monotonic() > deadline:
                return 1
        return 0 if self._error is None else self._explain(self._error)

    def _has_begun(self) -> bool:
        return any(self._logs.glob("rank-*.log"))

    def _run(self) -> None:
        try:
            make_trainer(self._spec, folder=self._folder, logs=self._logs).fit()
        except BaseException as error:
            self._error = error

    def _explain(self, error: BaseException) -> int:
        from ray.train import ControllerError, WorkerGroupError

        from diptych.launch.ray_ranks import first_failure

        if isinstance(error, WorkerGroupError):
            rank, text, ended = first_failure(error.worker_failures)
            if ended is None:
                write_note(self._logs, "why", f"Rank {rank} {text}")
            else:
                print(summary(rank, code=ended.code), flush=True)  # noqa: T201 - it is the log
            return 1
        if isinstance(error, ControllerError):
            error = error.controller_failure
            if "Startup" in type(error).__name__:
                waited = self._spec.placement.launch.start_timeout_s
                error = no_room(self._spec, have=_total(), free=_free(), waited_s=waited)
        write_note(self._logs, "why", f"Ray: {error}")
        return 1


def make_trainer(spec: RunSpec, *, folder: RunFolder, logs: Path) -> Any:
    """Make Ray Train's trainer of a run's ranks."""
    from ray.train import FailureConfig, LoggingConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    from diptych.launch.ray_ranks import Environment, News, run_rank

    placement = spec.placement
    os.environ["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = str(placement.launch.start_timeout_s)
    return TorchTrainer(
        run_rank,
        train_loop_config={
            "run": str(folder.path.absolute()),
            "logs": str(logs),
            "folder": str(Path.cwd()),
            "environment": {**rank_environment(spec, logs=logs), "PYTHONPATH": python_path()},
        },
        torch_config=cast(Any, Environment()),
        scaling_config=ScalingConfig(
            num_workers=placement.layout.world_size,
            use_gpu=resources(spec).get("GPU", 0) > 0,
            resources_per_worker=resources(spec),
            placement_strategy=placement.launch.ray.placement,
        ),
        run_config=RunConfig(
            name="ray",
            # It wants a folder of its own, and puts nothing there that is read again.
            storage_path=str(logs),
            failure_config=FailureConfig(
                max_failures=placement.max_restarts,
                # A cluster without room for the ranks is an error, not a reason to try again.
                controller_failure_limit=0,
            ),
            callbacks=[News(logs, max_restarts=placement.max_restarts)],
            logging_config=LoggingConfig(log_level="WARNING"),
        ),
    )


def resources(spec: RunSpec) -> dict[str, float]:
    """Return what Ray sets aside for each rank."""
    placement, ray = spec.placement, spec.placement.launch.ray
    gpus = ray.gpus_per_rank
    if gpus is None:
        gpus = 1.0 if placement.layout.device == "cuda" else 0.0
    asked = {"CPU": ray.cpus_per_rank or float(placement.threads_per_rank), "GPU": gpus}
    return {name: number for name, number in {**asked, **ray.resources}.items() if number}


def check_room(spec: RunSpec, *, have: Mapping[str, Mapping[str, float]]) -> None:
    """Refuse at once what a cluster that does not grow cannot hold.

    Raises:
        RunError: says what is asked, and what there is.
    """
    size = spec.placement.layout.world_size
    for name, number in resources(spec).items():
        if number * size > sum(node.get(name, 0.0) for node in have.values()):
            raise no_room(spec, have=have)


def no_room(
    spec: RunSpec,
    *,
    have: Mapping[str, Mapping[str, float]],
    free: Mapping[str, float] | None = None,
    waited_s: float = 0.0,
) -> RunError:
    """Say that a cluster has no room for the ranks.

    Args:
        spec: the run's.
        have: every node's resources, by its name.
        free: what of them nobody uses, over all nodes.
        waited_s: how long they were waited for.
    """
    each = resources(spec)
    ray, size = spec.placement.launch.ray, spec.placement.layout.world_size
    nodes = [f"{name} has {_said(node, names=each)}" for name, node in have.items()]
    if free is not None:
        nodes.append(f"free of all is {_said(free, names=each)}")
    waited = f" after {waited_s:g} s" if waited_s else ""
    return RunError(
        f"Ray has no room{waited} for {size} ranks of {_said(each, names=each)} each, "
        f"placed {ray.placement}: {'; '.join(nodes)}",
        cure="Plan fewer ranks (plan.layout.num_processes), or ask for less "
        "(train.launch.ray.cpus_per_rank, placement), or add nodes; where nodes come by "
        "themselves, raise train.launch.start_timeout_s",
    )


def summary(rank: int, *, code: int) -> str:
    """Say how a rank ended, in the form of torch elastic that `words.last_words` reads."""
    signal = how_ended(code).rpartition(" ")[2] if code < 0 else ""
    ended = f"{code} ({signal})" if signal else str(code)
    return f"Root Cause (first observed failure):\n  rank      : {rank}\n  exitcode  : {ended}"


def _said(numbers: Mapping[str, float], *, names: Mapping[str, float]) -> str:
    return ", ".join(f"{numbers.get(name, 0.0):g} {name}" for name in names)


def _total() -> dict[str, dict[str, float]]:
    import ray

    return {
        f"{node['NodeManagerAddress']} ({node['NodeID'][:6]})": dict(node["Resources"])
        for node in ray.nodes()
        if node["Alive"]
    }


def _free() -> Mapping[str, float]:
    import ray

    return ray.available_resources()


def _limit_wait(logs: Path, *, address: str | None) -> threading.Timer:
    """End this process where Ray keeps on waiting for a cluster; it can do so for minutes."""

    def give_up() -> None:
        where = f"at {address}" if address else "of this machine"
        write_note(logs, "why", f"No Ray cluster {where} has answered in {_CONNECT_S:g} s")
        os._exit(1)

    timer = threading.Timer(_CONNECT_S, give_up)
    timer.daemon = True
    timer.start()
    return timer


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    # Not by way of the interpreter's end: a thread may still wait for Ray, which is gone.
    os._exit(code)
