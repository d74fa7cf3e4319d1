"""Observe a run while a block runs: a rank's place in, its step records' taker out.

Every rank enters. The first rank of each node samples the node, the first of all observes steps.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass

from diptych.core.host import node_name
from diptych.core.records import RunSpec, StepRecord
from diptych.monitor.observer import open_observer
from diptych.monitor.run_folder import RunFolder
from diptych.monitor.sampler import device_entry, start_sampler


@dataclass(frozen=True)
class Place:
    """Where a rank is: its node, its process there, its device as CUDA_VISIBLE_DEVICES has it."""

    node: str
    pid: int
    device: str | None


def own_place(device_index: int | None) -> Place:
    """Return this process's place.

    Args:
        device_index: its device among those that CUDA shows, None on the CPU.
    """
    device = None
    if device_index is not None:
        device = device_entry(os.environ.get("CUDA_VISIBLE_DEVICES"), index=device_index)
    return Place(node_name(), pid=os.getpid(), device=device)


@contextmanager
def observing(
    folder: RunFolder,
    *,
    spec: RunSpec,
    attempt: int,
    step: int,
    rank: int,
    device_index: int | None,
    gather: Callable[[str], Sequence[str]],
) -> Iterator[Callable[[StepRecord], None]]:
    """Observe an attempt until the block ends, however it ends.

    Args:
        folder: of the run.
        spec: of the run.
        attempt: its number.
        step: how many steps are done.
        rank: this rank's.
        device_index: of this rank's device, None on the CPU.
        gather: collects a text of every rank, equal everywhere.

    Yields:
        What takes the record of every step; on ranks but the first it does nothing.
    """
    texts = gather(json.dumps(asdict(own_place(device_index))))
    places = [Place(**json.loads(text)) for text in texts]
    nodes = [place.node for place in places]
    node, every_s = nodes[rank], spec.placement.observe.sample_every_s
    with ExitStack() as stack:
        if every_s and nodes.index(node) == rank:
            here = [place for place in places if place.node == node]
            sampler = start_sampler(
                folder.samples,
                node=node,
                attempt=attempt,
                every_s=every_s,
                pids=[place.pid for place in here],
                devices=[place.device for place in here if place.device is not None],
            )
            if sampler is not None:
                stack.callback(sampler.close)
        if rank != 0:
            yield lambda record: None
            return
        observer = open_observer(folder, spec=spec, attempt=attempt, step=step, nodes=nodes)
        stack.callback(observer.close)
        yield observer.record
