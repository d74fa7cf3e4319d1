"""Real ranks for benchmarks: `run_ranks(2, function, rows=8)` calls a function in two processes.

In: how many ranks, a function at a module's top level, its keyword arguments. Out: what it
returned on each rank, rank 0 first. Ranks meet over gloo on the CPU, one thread each; the process
group is there when the function starts and gone after. A rank that fails or hangs ends all.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

LIMIT_S = 1800.0
"""A call that takes longer hangs."""


def run_ranks(world_size: int, function: Callable[..., Any], /, **arguments: Any) -> list[Any]:
    """Call a function on every rank of a new process group.

    Args:
        world_size: how many processes.
        function: at the top level of a module; it and its arguments are pickled.
        arguments: the same on every rank; which one it is, `torch.distributed.get_rank()` says.

    Returns:
        What each rank returned.

    Raises:
        RuntimeError: a rank failed, with its traceback.
        TimeoutError: not every rank was done after `LIMIT_S` seconds.
    """
    context = multiprocessing.get_context("spawn")
    results: dict[int, Any] = {}
    processes, pipes = [], {}
    with tempfile.TemporaryDirectory(prefix="diptych-bench-") as folder:
        try:
            for rank in range(world_size):
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(
                    target=_serve,
                    args=(theirs, rank, world_size, folder, function, arguments),
                    daemon=True,
                )
                process.start()
                theirs.close()
                processes.append(process)
                pipes[ours] = rank
            end = time.monotonic() + LIMIT_S
            while len(results) < world_size:
                ready = wait(pipes, timeout=max(0.0, end - time.monotonic()))
                if not ready:
                    raise TimeoutError(f"{function.__name__}: ranks {sorted(pipes.values())} hang")
                for pipe in ready:
                    assert isinstance(pipe, Connection)
                    rank = pipes.pop(pipe)
                    results[rank] = _receive(pipe, rank=rank)
        finally:
            for process in processes:
                process.join(timeout=10 if len(results) == world_size else 0)
                process.kill()
                process.join()
    return [results[rank] for rank in range(world_size)]


def _receive(pipe: Connection, *, rank: int) -> Any:
    try:
        ok, value = pipe.recv()
    except EOFError:
        raise RuntimeError(f"rank {rank} died without a word") from None
    if not ok:
        raise RuntimeError(f"rank {rank} failed:\n{value}")
    return value


def _serve(
    pipe: Connection,
    rank: int,
    world_size: int,
    folder: str,
    function: Callable[..., Any],
    arguments: dict[str, Any],
) -> None:
    os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore

    torch.set_num_threads(1)
    try:
        store = FileStore(f"{folder}/store", world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        answer = (True, function(**arguments))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        answer = (False, traceback.format_exc())
    pipe.send(answer)
