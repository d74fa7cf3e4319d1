"""What a save loses: beside training and waited for, ours and torch's `async_save`.

A stand-in for training (a matrix product of some tens of milliseconds and an all-reduce, on one
thread a rank) runs beside saves of a state of plain tensors. Lost is what training waited, and what
the steps took longer than usual until the save was done. One rank leaves a core of two spare, two
ranks leave none. Ways take turns, round by round; medians. The ratio is the worst of what
`checkpoint_saving: auto` settles on against waiting, over all sizes; the goal is at most 1, and at
most 0.5 where a core is spare. Reading is timed too: checking all files and loading them, from the
disk, against plain reads of the same files.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from _ranks import run_ranks
from diptych.parallel import storage
from diptych.parallel.mesh import World, gather_numbers
from diptych.train.retention import Keep
from diptych.train.saver import Saver, Stage
from run import Measured

_MB = 1 << 20
_CASES = ((1, 256), (1, 512), (1, 1024), (1, 2048), (2, 256), (2, 512), (2, 1024))
"""Ranks, and MB of state of each."""
_ROUNDS = 5
_QUIET_STEPS = 8
_TENSOR_MB = 32
_LIMIT_STEPS = 400


def measure(options: argparse.Namespace) -> Measured:
    """Measure every case."""
    raw: dict[str, Any] = {}
    for world_size, mb in _CASES:
        with tempfile.TemporaryDirectory() as folder:
            found = run_ranks(world_size, _run, folder=folder, mb=mb)[0]
        raw[f"{world_size} ranks, {mb} MB each"] = found
        print(world_size, mb, {name: round(value, 3) for name, value in found.items()}, flush=True)
    auto = {name: min(1.0, each["async"] / each["sync"]) for name, each in raw.items()}
    spare = [ratio for name, ratio in auto.items() if name.startswith("1")]
    reads = [each["read"] for each in raw.values() if "read" in each]
    return Measured(
        unit="lost by auto / lost by waiting, worst case",
        ours=max(auto.values()),
        peers={
            "sync": 1.0,
            "dcp.async_save": max(each["dcp"] / each["sync"] for each in raw.values()),
        },
        ratio=max(auto.values()),
        goal="at most 1, at most 0.5 where a core is spare; reads at 0.8 of the disk's rate",
        met=max(auto.values()) <= 1.0 and max(spare) <= 0.5 and min(reads) >= 0.8,
        raw=raw,
    )


def _run(*, folder: str, mb: int) -> dict[str, float]:
    """Take all ways in turns; return the medians of what they lose."""
    world = World(rank=dist.get_rank(), size=dist.get_world_size(), device=torch.device("cpu"))
    tensors = {
        f"model.{world.rank}.{number}": torch.randn(_TENSOR_MB * _MB // 4)
        for number in range(mb // _TENSOR_MB)
    }
    training = _Training(world)
    ways = {
        "async": _Ours(Path(folder) / "async", saving="async", tensors=tensors, world=world),
        "sync": _Ours(Path(folder) / "sync", saving="sync", tensors=tensors, world=world),
        "dcp": _Torch(Path(folder) / "dcp", tensors=tensors, world=world),
    }
    lost: dict[str, list[float]] = {name: [] for name in ways}
    stalls: list[float] = []
    for number in range(_ROUNDS + 1):
        for name, way in ways.items():
            training.settle()
            stall_s, slowed_s = training.through(way)
            if number:  # the first round makes buffers and folders
                lost[name].append(stall_s + slowed_s)
                if name == "async":
                    stalls.append(stall_s)
    for way in ways.values():
        way.close()
    # With two ranks each would load both states: these tensors are not sharded.
    reading = _read(Path(folder) / "sync", tensors=tensors) if world.size == 1 else {}
    medians = {name: statistics.median(each) for name, each in lost.items()}
    return {**medians, "async stall": statistics.median(stalls), **reading}


class _Training:
    """Steps, and what they usually take, by this rank's clock; all ranks go together."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._left = torch.randn(1024, 1024)
        self._right = torch.randn(1024, 1024) / 32
        self._usual: list[float] = []

    def step(self) -> float:
        started = time.perf_counter()
        self._left = torch.tanh(self._left @ self._right)
        if self._world.size > 1:
            dist.all_reduce(self._left)
            self._left /= self._world.size
        return time.perf_counter() - started

    def settle(self) -> None:
        """Let the disk come to rest, and look at the usual time again."""
        os.sync()
        dist.barrier()
        self._usual = [self.step() for _ in range(_QUIET_STEPS)]

    def through(self, way: Any) -> tuple[float, float]:
        """Save, and train until the save is done; return seconds waited and slowed."""
        usual_s = statistics.median(self._usual)
        dist.barrier()
        started = time.perf_counter()
        way.begin()
        stall_s = time.perf_counter() - started
        slowed_s = 0.0
        for _ in range(_LIMIT_STEPS):
            step_s = self.step()
            started = time.perf_counter()
            done = way.look(step_s)
            slowed_s += step_s - usual_s + time.perf_counter() - started
            if done:
                break
        else:
            raise RuntimeError(f"a save takes more than {_LIMIT_STEPS} steps")
        return stall_s, max(0.0, slowed_s)


class _Ours:
    """Our saver, told of every step as the loop does."""

    def __init__(
        self, folder: Path, *, saving: Any, tensors: dict[str, torch.Tensor], world: World
    ) -> None:
        self._saver = Saver(folder, keep=Keep(last=1), saving=saving, world=world)
        self._tensors = _all_names(tensors, world=world)
        self._world = world
        self._step = 0

    def begin(self) -> None:
        self._step += 1
        self._saver.save(
            f"step-{self._step:08d}",
            step=self._step,
            tensors=lambda: self._tensors,
            state={},
            logs={},
        )

    def look(self, step_s: float) -> bool:
        shares = gather_numbers(self._saver.share, world=self._world)
        self._saver.observe(shares, step_s=step_s)
        return bool((shares[:, 0] == Stage.IDLE).all())

    def close(self) -> None:
        self._saver.finish()
        self._saver.close()


class _Torch:
    """`dcp.async_save` as its documentation has it, on a process group of its own."""

    def __init__(self, folder: Path, *, tensors: dict[str, torch.Tensor], world: World) -> None:
        self._folder = folder
        self._tensors = tensors
        self._world = world
        self._group: Any = dist.new_group(backend="gloo")
        self._future: Any = None

    def begin(self) -> None:
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
        from torch.distributed.checkpoint.state_dict_saver import async_save

        if self._world.is_first:
            shutil.rmtree(self._folder, ignore_errors=True)
        dist.barrier()
        self._future = async_save(
            dict(self._tensors),
            storage_writer=HuggingFaceStorageWriter(str(self._folder), save_distributed=True),
            process_group=self._group,
        )

    def look(self, step_s: float) -> bool:
        return bool(gather_numbers([self._future.done()], world=self._world).all())

    def close(self) -> None:
        self._future.result()


def _all_names(tensors: dict[str, torch.Tensor], *, world: World) -> dict[str, torch.Tensor]:
    """Name every rank's tensors in turns, so that each rank is given its own to write."""
    own = list(tensors.values())
    return {
        f"model.{rank}.{number}": own[number]
        for number in range(len(own))
        for rank in range(world.size)
    }


def _read(folder: Path, *, tensors: dict[str, torch.Tensor]) -> dict[str, float]:
    """Check and load a checkpoint of one rank from the disk, against plain reads of its files."""
    newest = storage.list_checkpoints(folder)[-1]

    def ours() -> None:
        storage.verify(newest)
        storage.load(newest, tensors=tensors)

    def plain() -> None:
        for path in sorted(newest.glob("*.safetensors")):
            with path.open("rb", buffering=0) as file:
                while file.read(16 * _MB):
                    pass

    seconds: dict[str, list[float]] = {"ours": [], "plain": []}
    for _ in range(_ROUNDS):
        for name, read in (("plain", plain), ("ours", ours)):
            seconds[name].append(_cold(read, folder=newest))
    ours_s, plain_s = (statistics.median(seconds[name]) for name in ("ours", "plain"))
    return {"read": plain_s / ours_s, "read s": ours_s, "plain read s": plain_s}


def _cold(read: Callable[[], None], *, folder: Path) -> float:
    """Time a read of files that are not in the page cache."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    started = time.perf_counter()
    read()
    return time.perf_counter() - started
