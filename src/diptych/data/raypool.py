"""Run one function over many tasks on a Ray cluster, as `pool.run_tasks` does in processes.

The tasks are the same, and what they compute lies in the same files: every node must see them. A
task whose worker was killed is done again elsewhere; files are replaced whole, so that changes
nothing. Ray sends functions and tasks as pickles, between the cluster's own processes.
"""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from diptych.core.errors import RunError
from diptych.core.ray import connected
from diptych.data.pool import Pool, died

Task = TypeVar("Task")
Result = TypeVar("Result")

_IN_FLIGHT_PER_CPU = 2
_MAX_RETRIES = 3


@contextmanager
def opened_ray_pool(address: str | None, *, num_processes: int | None) -> Iterator[Pool]:
    """Yield what runs tasks on a cluster, a core each.

    Args:
        address: of a running cluster; None starts one on this machine, which then ends.
        num_processes: at most so many tasks at once; None takes all of the cluster's cores.

    Raises:
        RunError: the cluster cannot be used.
    """
    with connected(address, num_cpus=num_processes):
        import ray

        num_cpus = int(ray.cluster_resources().get("CPU", 0)) or 1
        most = num_processes if address and num_processes else num_cpus * _IN_FLIGHT_PER_CPU
        yield partial(_run_tasks, most_in_flight=most)


def _run_tasks(
    function: Callable[[Task], Result], tasks: Iterable[Task], *, most_in_flight: int
) -> Iterator[Result]:
    """Yield `function(task)` for each task, in order; see `pool.run_tasks`."""
    import ray

    remote = ray.remote(num_cpus=1, max_retries=_MAX_RETRIES)(_call)
    folder = str(Path.cwd())
    waiting: deque[Any] = deque()
    for task in tasks:
        waiting.append(remote.remote(function, task, folder))
        if len(waiting) >= most_in_flight:
            yield _result(waiting.popleft())
    while waiting:
        yield _result(waiting.popleft())


def _result(reference: Any) -> Any:
    """Wait for one task; what it raised is raised as it was."""
    import ray
    from ray.exceptions import RayError, RayTaskError

    try:
        return ray.get(reference)
    except RayTaskError as error:
        raise error.cause from None
    except RayError as error:
        raise died() from error


def _call(function: Callable[[Task], Result], task: Task, folder: str) -> Result:
    """Do a task where the project's folder is: its paths may be relative to that."""
    try:
        os.chdir(folder)
    except OSError as error:
        raise RunError(
            f"The node {socket.gethostname()} has no folder {folder}",
            cure="Every node of the Ray cluster needs the project's folder at the same path",
        ) from error
    return function(task)
