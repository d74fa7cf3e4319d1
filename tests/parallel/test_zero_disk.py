"""ZeRO's states on a disk: the same results, one run at a time, nothing left."""

from __future__ import annotations

import ctypes.util
import shutil

import numpy as np
import pytest
import torch

from diptych.core.errors import LayoutError
from diptych.core.records import OptimizerOffload, ParameterOffload
from diptych.parallel.mesh import World
from diptych.parallel.zero_disk import SwapFolders
from tests.parallel.zero_toy import batches_of, compile_kernel, engine_of, step, train, whole, zero

BIG = {"width": 700, "inner": 1024, "freeze": False}
"""Weights of which DeepSpeed moves a rank's part: less than 1 MiB stays in memory."""


def _on_disk(path):
    offload = {"to": "nvme", "path": str(path)}
    return {
        "optimizer": OptimizerOffload(**offload, adam="torch"),
        "parameters": ParameterOffload(**offload, buffer_size=1_000_000, max_in_cpu=0),
    }


def _save_and_load(layout, folder):
    """Save after two steps, and load into an engine that has none of it."""
    from diptych.parallel import storage

    found = []
    for saves in (True, False):
        engine, world = engine_of(layout, **BIG)
        for batch in batches_of(2) if saves else ():
            step(engine, world, batch)
        tensors = engine.tensors()
        if saves:
            storage.save(folder, tensors=tensors, state={}, world=world)
        else:
            storage.load(folder, tensors=tensors)
            engine.take(tensors, num_updates=2)
        found.append(whole(engine.tensors(), world))
        engine.close()
    return found


@pytest.fixture(scope="session")
def aio():
    compile_kernel("AsyncIOBuilder")


@pytest.mark.slow
@pytest.mark.usefixtures("aio")
@pytest.mark.timeout(1800)
@pytest.mark.skipif(
    not (ctypes.util.find_library("aio") and shutil.which("g++") and shutil.which("ninja")),
    reason="DeepSpeed needs libaio, g++ and ninja for NVMe, which are not all here",
)
def test_states_on_a_disk_change_no_result(ranks, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    settings = {"num_steps": 4, "micro_batches": (1, 2), **BIG}
    memory = ranks(2).run(train, layout=zero(3), **settings)[0]
    layout = zero(3, **_on_disk(disk))
    found = ranks(2).run(train, layout=layout, **settings)[0]
    np.testing.assert_allclose(found["losses"], memory["losses"], rtol=1e-6)
    for name, tensor in memory["tensors"].items():
        torch.testing.assert_close(found["tensors"][name], tensor, rtol=1e-5, atol=1e-5)
    folder = tmp_path / "step-00000002"
    saved, loaded = ranks(2).run(_save_and_load, layout=layout, folder=folder)[0]
    assert all(torch.equal(saved[name], loaded[name]) for name in saved)
    # The run leaves locks, and nothing of its states.
    assert {path.suffix for path in disk.rglob("*") if path.is_file()} == {".lock"}


def test_a_folder_on_a_disk_is_one_runs_at_a_time(tmp_path):
    layout = zero(3, **_on_disk(tmp_path))
    world = World(rank=0, size=1, device=torch.device("cpu"))
    first = SwapFolders(layout, world=world)
    states = tmp_path / "zero_stage_3" / "optimizer"
    for rank in (0, 1):
        (states / f"rank{rank}").mkdir(parents=True)
    with pytest.raises(LayoutError, match="Another run offloads to"):
        SwapFolders(layout, world=world)
    first.clear()
    assert [path.name for path in states.iterdir()] == ["rank1"]
    SwapFolders(layout, world=world).clear()
