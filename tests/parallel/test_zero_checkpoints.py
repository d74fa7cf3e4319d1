"""A checkpoint that ZeRO wrote is any engine's, and the other way round, to the last bit.

Here of one element, of fewer rows than ranks, before the first update; `test_reshard.py` has every
layout.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from diptych.core.records import Layout, ParameterOffload
from tests.parallel.zero_toy import (
    CPU,
    STAGES,
    Toy,
    batches_of,
    close,
    engine_of,
    step,
    whole,
    zero,
)


def _save(layout, *, folder, num_steps):
    """Train some steps and save; return what was saved, and the losses of two more steps."""
    from diptych.parallel import storage

    engine, world = engine_of(layout)
    batches = batches_of(num_steps + 2)
    for batch in batches[:num_steps]:
        step(engine, world, batch)
    tensors = engine.tensors()
    storage.save(folder, tensors=tensors, state={"engine": engine.state()}, world=world)
    found = whole(tensors, world)
    losses = [step(engine, world, batch)[0] for batch in batches[num_steps:]]
    close(engine)
    return found, losses


def _load(layout, *, folder, num_steps):
    """Load what was saved; return what the engine has then, and the losses of two more steps."""
    from diptych.parallel import storage

    engine, world = engine_of(layout)
    batches = batches_of(num_steps + 2)
    # Another state than a fresh engine's, so that what is not loaded shows.
    step(engine, world, batches[0].flip(0))
    tensors = engine.tensors()
    storage.load(folder, tensors=tensors)
    engine.take(tensors, num_updates=num_steps)
    engine.restore(storage.read_state(folder)["engine"])
    found = whole(engine.tensors(), world)
    losses = [step(engine, world, batch)[0] for batch in batches[num_steps:]]
    close(engine)
    return found, losses


OTHERS = {
    "one process": Layout(),
    "fsdp2 on 3 ranks": Layout(engine="fsdp2", shard=3),
    "zero 1 on 3 ranks": zero(1, ranks=3),
    "zero 3": zero(3),
    "zero 3 on 3 ranks, offloaded": zero(
        3, ranks=3, optimizer=CPU, parameters=ParameterOffload(to="cpu")
    ),
}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("zero 1 on 3 ranks", "one process"),
        ("zero 3", "fsdp2 on 3 ranks"),
        ("fsdp2 on 3 ranks", "zero 3 on 3 ranks, offloaded"),
    ],
)
def test_a_checkpoint_goes_from_any_engine_to_any_other(before, after, ranks, tmp_path):
    folder = tmp_path / "step-00000003"
    first, second = OTHERS[before], OTHERS[after]
    saved = ranks(first.world_size).run(_save, layout=first, folder=folder, num_steps=3)
    loaded = ranks(second.world_size).run(_load, layout=second, folder=folder, num_steps=3)
    expected, found = saved[0][0], loaded[0][0]
    assert expected.keys() == found.keys()
    assert "model.up.weight" in found  # frozen
    assert "optimizer.gain.exp_avg" in found  # one element
    for name, tensor in expected.items():
        assert torch.equal(tensor, found[name]), name
    np.testing.assert_allclose(
        np.sum([losses for _, losses in loaded], axis=0),
        np.sum([losses for _, losses in saved], axis=0),
        rtol=1e-5,
    )


@pytest.mark.parametrize("stage", STAGES)
def test_a_checkpoint_can_be_written_before_the_first_update(stage, ranks, tmp_path):
    folder = tmp_path / "step-00000000"
    layout = zero(stage)
    saved = ranks(2).run(_save, layout=layout, folder=folder, num_steps=0)
    start = {f"model.{name}": each.detach() for name, each in Toy().named_parameters()}
    for name, tensor in saved[0][0].items():
        expected = start.get(name, torch.zeros_like(tensor))
        assert torch.equal(tensor, expected), name
    loaded = ranks(2).run(_load, layout=layout, folder=folder, num_steps=0)
    assert loaded[0][1] == saved[0][1]


def _shards(layout):
    from torch.distributed.tensor import DTensor

    engine, world = engine_of(layout)
    shapes = {
        name: tuple(each.to_local().shape)
        for name, each in engine.tensors().items()
        if isinstance(each, DTensor)
    }
    close(engine)
    return world.rank, shapes


def test_a_rank_keeps_the_rows_that_fsdp2_would_give_it(ranks):
    ours = ranks(3).run(_shards, layout=zero(3, ranks=3))
    fsdp = ranks(3).run(_shards, layout=Layout(engine="fsdp2", shard=3))
    for (_, found), (_, expected) in zip(ours, fsdp, strict=True):
        assert found == {name: expected[name] for name in found}
    assert ours[2][1]["model.narrow.weight"] == (0, 17)
