"""Run one function over many tasks in processes, results in the tasks' order.

In: a function of one argument, defined in a module, and its tasks. Out: the results, one by one,
with at most a few tasks in flight, so that memory does not grow with their number. Knows nothing of
what is computed.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Protocol, TypeVar

from diptych.core.errors import RunError

Task = TypeVar("Task")
Result = TypeVar("Result")

_IN_FLIGHT_PER_PROCESS = 2
_PR_SET_PDEATHSIG = 1


class Pool(Protocol):
    """Runs a function over tasks; it can be asked again."""

    def __call__(
        self, function: Callable[[Task], Result], tasks: Iterable[Task]
    ) -> Iterator[Result]:
        """Yield `function(task)` for each task, in order."""
        ...


def run_tasks(
    function: Callable[[Task], Result], tasks: Iterable[Task], *, num_processes: int | None = None
) -> Iterator[Result]:
    """Yield `function(task)` for each task, in order.

    Args:
        function: A module's function; it and its results travel between processes.
        tasks: Read as they are needed.
        num_processes: None takes one per core; 1 runs everything in this process.

    Raises:
        RunError: A process died (killed, or out of memory).
        Exception: Whatever `function` raised; tasks that wait are dropped.
    """
    count = num_processes or available_cores()
    if count == 1:
        yield from map(function, tasks)
        return
    executor = ProcessPoolExecutor(
        count,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_end_with_parent,
        initargs=(os.getpid(),),
    )
    waiting: deque[Future[Result]] = deque()
    try:
        for task in tasks:
            waiting.append(executor.submit(function, task))
            if len(waiting) >= count * _IN_FLIGHT_PER_PROCESS:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise died() from error
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def died() -> RunError:
    """Return what is raised where a process is gone, and its task with it."""
    return RunError(
        "A process that prepared data died, perhaps for lack of memory",
        cure="Run again: what is finished is kept. Fewer processes need less memory: set "
        "num_processes in prepare.index and prepare.shards",
    )


def available_cores() -> int:
    """Count the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _end_with_parent(parent: int) -> None:
    """Have the kernel end this process when the one that started it ends, however that happens."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(os, "sched_getaffinity"):  # Linux
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)
