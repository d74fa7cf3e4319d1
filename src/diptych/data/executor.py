"""Where a stage's tasks run: settings in, something that runs a function over tasks out.

Processes of this machine (`pool`) or a Ray cluster (`raypool`). Which of them changes no result.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Literal

from diptych.core.records import Section
from diptych.data.pool import Pool, run_tasks
from diptych.data.raypool import opened_ray_pool


class ExecutorParams(Section):
    """`prepare.executor`: where the parts of the index and the shards are worked on.

    `local`: processes of this machine. `ray`: tasks on a Ray cluster, whose nodes all see the raw
    samples and the project's folder at the same paths. `address`: of a cluster that this machine is
    a node of, `auto` or host:port; None starts one on this machine that ends with the stage.
    """

    kind: Literal["local", "ray"] = "local"
    address: str | None = None


LOCAL = ExecutorParams()


@contextmanager
def opened_pool(
    executor: ExecutorParams, *, num_processes: int | None, is_small: bool
) -> Iterator[Pool]:
    """Yield what runs tasks, on this machine or on a cluster.

    Args:
        executor: where.
        num_processes: at most so many at once; None takes all cores there are.
        is_small: starting processes takes longer than the work, so this one does it; a cluster that
            was asked for is used all the same.

    Raises:
        RunError: the cluster cannot be used.
    """
    if executor.kind == "local":
        yield partial(run_tasks, num_processes=1 if is_small else num_processes)
        return
    with opened_ray_pool(executor.address, num_processes=num_processes) as pool:
        yield pool
