"""Numbers of all ranks, waited for at once or later, beside other collectives."""

from __future__ import annotations

import socket
import time
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist

from diptych.parallel import mesh
from diptych.parallel.mesh import World, begin_gather, gather_numbers

LATE_S = 0.5


def _here() -> World:
    return World(rank=dist.get_rank(), size=dist.get_world_size(), device=torch.device("cpu"))


def _gather() -> np.ndarray:
    world = _here()
    return gather_numbers([world.rank, 0.1 + world.rank, 2.0**53 + 2 * world.rank], world=world)


def _gather_late() -> tuple[float, np.ndarray]:
    """Begin while the second rank is late; compute and reduce meanwhile."""
    world = _here()
    dist.barrier()
    time.sleep(LATE_S * world.rank)
    started = time.perf_counter()
    wait = begin_gather([10.0 + world.rank], world=world)
    begun_s = time.perf_counter() - started
    sums = torch.tensor([float(world.rank + 1)])
    dist.all_reduce(sums)
    other = gather_numbers([20.0 + world.rank], world=world)
    return begun_s, np.concatenate([wait(), other, sums[None].expand(world.size, 1)], axis=1)


def test_every_rank_holds_all_ranks_numbers(ranks) -> None:
    expected = [[0, 0.1, 2.0**53], [1, 1.1, 2.0**53 + 2]]
    for found in ranks(2).run(_gather):
        assert found.dtype == np.float64
        np.testing.assert_array_equal(found, expected)


def test_to_begin_waits_for_nobody_and_other_collectives_may_pass(ranks) -> None:
    for begun_s, found in ranks(2).run(_gather_late):
        assert begun_s < LATE_S / 2
        np.testing.assert_array_equal(found, [[10, 20, 3], [11, 21, 3]])


def test_a_rank_alone_gathers_its_own() -> None:
    world = World(rank=0, size=1, device=torch.device("cpu"))
    np.testing.assert_array_equal(gather_numbers([1.0, 2.5], world=world), [[1.0, 2.5]])
    assert gather_numbers([], world=world).shape == (1, 0)


def test_the_store_listens_on_the_address_that_ranks_dial():
    descriptor = mesh._listen("127.0.0.1", port=0)
    with socket.socket(fileno=descriptor) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"
        taken = listener.getsockname()[1]
        with pytest.raises(OSError, match="in use"):
            mesh._listen("127.0.0.1", port=taken)


def test_an_address_of_another_machine_is_not_listened_on_and_said(caplog):
    # 192.0.2.0/24 is for documentation: nobody has it.
    assert mesh._listen("192.0.2.1", port=0) is None
    assert "192.0.2.1 is no address of this machine" in caplog.text


def test_a_store_of_the_launcher_is_used(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert mesh._meeting_point(timedelta(seconds=1)) == {}
