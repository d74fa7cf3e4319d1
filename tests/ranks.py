"""Real ranks for tests: one persistent gloo process group per world size, one thread per rank.

`pool.run(function, **arguments)` calls a module-level function on every rank and returns the list
of results, rank 0 first. An exception on any rank is raised here with its traceback; a rank that
hangs is ended after a time limit and every rank's stack is shown.
"""

from __future__ import annotations

import faulthandler
import multiprocessing as mp
import os
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

_LIMIT_S = 120.0


class RankPool:
    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._folder = tempfile.TemporaryDirectory(prefix="diptych-ranks-")
        context = mp.get_context("spawn")
        self._closed = False
        self._pipes = []
        self._processes = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            arguments = (theirs, rank, world_size, self._folder.name)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    @property
    def alive(self) -> bool:
        return not self._closed and all(process.is_alive() for process in self._processes)

    def run(self, function: Callable[..., Any], **arguments: Any) -> list[Any]:
        for pipe in self._pipes:
            pipe.send((function, arguments))
        results = []
        errors = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(_LIMIT_S + 5):
                stacks = self._stacks()
                self.close()
                # A rank that failed leaves the others waiting for it: its error is the cause.
                failed = "\n".join(errors)
                raise TimeoutError(f"rank {rank} hangs in {function.__name__}:\n{failed}{stacks}")
            ok, value = pipe.recv()
            (results if ok else errors).append(value)
        if errors:
            if results:  # the ranks no longer agree on which collective is next
                self.close()
            raise AssertionError("a rank failed:\n" + "\n".join(errors))
        return results

    def close(self) -> None:
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.kill()
            process.join()
            pipe.close()
        self._closed = True
        self._folder.cleanup()

    def _stacks(self) -> str:
        folder = Path(self._folder.name)
        return "\n".join(path.read_text() for path in sorted(folder.glob("stack-*")))


def _serve(pipe: Any, rank: int, world_size: int, folder: str) -> None:
    os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    with open(f"{folder}/stack-{rank}", "w") as stack:
        while True:
            try:
                function, arguments = pipe.recv()
            except EOFError:
                return
            faulthandler.dump_traceback_later(_LIMIT_S, file=stack)
            try:
                answer = (True, function(**arguments))
            except BaseException:
                answer = (False, f"rank {rank}: {traceback.format_exc()}")
            faulthandler.cancel_dump_traceback_later()
            pipe.send(answer)
