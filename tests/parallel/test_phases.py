"""Phases by a clock that the test moves, and on real ranks of which one is late."""

from __future__ import annotations

import time
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist
from torch import nn

from diptych.core.records import Layout
from diptych.parallel.mesh import World
from diptych.parallel.phases import PHASES, Phases
from diptych.parallel.spread import spread

CPU = torch.device("cpu")
LATE_S = 0.3


class Clock:
    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


def test_phases_add_up_to_the_time_and_one_inside_another_is_taken_out(clock):
    phases = Phases(CPU, clock=clock)
    clock.now_s += 1
    with phases.of("backward"):
        clock.now_s += 2
        with phases.of("communication"):
            clock.now_s += 4
        clock.now_s += 8
    clock.now_s += 16
    taken = phases.take()
    assert taken == dict.fromkeys(PHASES, 0.0) | {
        "other": 17.0,
        "backward": 10.0,
        "communication": 4.0,
    }
    assert set(phases.take().values()) == {0.0}


def test_the_rest_of_a_block_can_be_another_phase(clock):
    phases = Phases(CPU, clock=clock)
    with phases.of("backward"):
        clock.now_s += 1
        phases.turn("communication")
        clock.now_s += 2
    clock.now_s += 4
    taken = phases.take()
    assert (taken["backward"], taken["communication"], taken["other"]) == (1.0, 2.0, 4.0)
    phases.turn("communication")
    clock.now_s += 8
    assert phases.take()["other"] == 8.0


def test_what_raises_ends_its_phase(clock):
    phases = Phases(CPU, clock=clock)
    with suppress(ValueError), phases.of("forward"):
        clock.now_s += 1
        raise ValueError
    clock.now_s += 2
    taken = phases.take()
    assert (taken["forward"], taken["other"]) == (1.0, 2.0)


def _wait_for_the_last(*, engine: str) -> dict[str, float]:
    """One backward pass, to which the last rank comes late."""
    rank, size = dist.get_rank(), dist.get_world_size()
    world = World(rank=rank, size=size, device=CPU)
    axes = {"shard": size} if engine == "fsdp2" else {"dp": size}
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    spread_module = spread(
        module,
        model=module,
        units=(),
        layout=Layout(engine=engine, **axes),
        world=world,
        build_optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    )
    phases = Phases(CPU)
    for late_s in (0.0, LATE_S):
        dist.barrier()
        phases.take()
        with phases.watching_waits(), spread_module.micro_batch(is_last=True):
            with phases.of("forward"):
                loss = spread_module.module(torch.ones(2, 8)).sum()
                time.sleep(late_s if rank == size - 1 else 0.0)
            with phases.of("backward"):
                spread_module.backward(
                    loss, weight=1.0, computed=lambda: phases.turn("communication")
                )
        spread_module.drop_gradient()
    taken = phases.take()
    spread_module.close()
    return dict(taken)


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_who_waits_for_a_late_rank_communicates(ranks, engine):
    first, last = ranks(2).run(_wait_for_the_last, engine=engine)
    assert first["communication"] > LATE_S / 2 > first["forward"] + first["backward"]
    assert last["forward"] >= LATE_S > last["communication"]


def test_the_wait_of_torch_is_put_back():
    before = dist.Work.wait
    with suppress(ValueError), Phases(CPU).watching_waits():
        assert dist.Work.wait is not before
        raise ValueError
    assert dist.Work.wait is before
