"""The mean of the weights follows every update, on every engine, as it does by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from diptych.core.records import Layout
from diptych.parallel.moments import follow, make_states, set_steps
from diptych.train.optimizers import build_optimizer
from tests.parallel.zero_toy import (
    CPU,
    SPEC,
    Toy,
    batches_of,
    close,
    engine_of,
    step,
    whole,
    zero,
)

DECAY = 0.75
LAYOUTS = {
    "one process": Layout(),
    "ddp": Layout(engine="ddp", dp=2),
    "fsdp2 on 3 ranks": Layout(engine="fsdp2", shard=3),
    "zero 1 in bf16": zero(1, precision="bf16"),
    "zero 2 on 3 ranks": zero(2, ranks=3),
    "zero 2, offloaded": zero(2, optimizer=CPU),
    "zero 3": zero(3),
    "zero 3, offloaded": zero(3, optimizer=CPU),
}


def train(layout, *, num_steps):
    """Train; return the whole weights and means after each step, the second of which is skipped."""
    engine, world = engine_of(layout, ema_decay=DECAY)
    found, applied = [whole(engine.tensors(), world)], []
    for number, batch in enumerate(batches_of(num_steps)):
        _, update = step(engine, world, batch, poison=float("nan") if number == 1 else None)
        applied.append(update.applied)
        found.append(whole(engine.tensors(), world))
    close(engine)
    return found, applied


@pytest.mark.parametrize("name", LAYOUTS)
def test_it_is_the_mean_by_hand(name, ranks):
    layout = LAYOUTS[name]
    found, applied = ranks(layout.world_size).run(train, layout=layout, num_steps=4)[0]
    assert applied == [True, False, True, True]
    for weight, parameter in Toy().named_parameters():
        if not parameter.requires_grad:
            assert f"optimizer.{weight}.ema" not in found[-1]
            continue
        first = found[0][f"model.{weight}"]
        # DeepSpeed makes its fp32 weights of those that it has rounded.
        torch.testing.assert_close(first, parameter.detach(), rtol=4e-3, atol=0)
        assert "bf16" in name or torch.equal(first, parameter)
        mean = first.clone()
        for number, tensors in enumerate(found):
            if number and applied[number - 1]:
                mean = DECAY * mean + (1 - DECAY) * tensors[f"model.{weight}"]
            torch.testing.assert_close(
                tensors[f"optimizer.{weight}.ema"], mean, rtol=1e-5, atol=1e-6
            )
        assert not torch.equal(mean, found[-1][f"model.{weight}"])


def save(layout, *, folder):
    from diptych.parallel import storage

    engine, world = engine_of(layout, ema_decay=DECAY)
    batches = batches_of(5)
    for batch in batches[:3]:
        step(engine, world, batch)
    storage.save(folder, tensors=engine.tensors(), state={}, world=world)
    for batch in batches[3:]:
        step(engine, world, batch)
    found = whole(engine.tensors(), world)
    close(engine)
    return found


def load(layout, *, folder):
    from diptych.parallel import storage

    engine, world = engine_of(layout, ema_decay=DECAY)
    tensors = engine.tensors()
    storage.load(folder, tensors=tensors)
    engine.take(tensors, num_updates=3)
    for batch in batches_of(5)[3:]:
        step(engine, world, batch)
    found = whole(engine.tensors(), world)
    close(engine)
    return found


@pytest.mark.parametrize("name", ["one process", "ddp", "fsdp2 on 3 ranks", "zero 3"])
def test_resumed_it_is_the_same_to_the_last_bit(name, ranks, tmp_path):
    layout, folder = LAYOUTS[name], tmp_path / "step-00000003"
    through = ranks(layout.world_size).run(save, layout=layout, folder=folder)[0]
    resumed = ranks(layout.world_size).run(load, layout=layout, folder=folder)[0]
    assert through.keys() == resumed.keys()
    assert all(torch.equal(through[each], resumed[each]) for each in through)


def test_it_goes_from_one_engine_to_another(ranks, tmp_path):
    folder = tmp_path / "step-00000003"
    fsdp, deepspeed = LAYOUTS["fsdp2 on 3 ranks"], LAYOUTS["zero 3"]
    through = ranks(3).run(save, layout=fsdp, folder=folder)[0]
    resumed = ranks(2).run(load, layout=deepspeed, folder=folder)[0]
    for name, tensor in through.items():
        torch.testing.assert_close(resumed[name], tensor, rtol=1e-3, atol=1e-4)


def test_a_checkpoint_without_means_is_refused_by_a_run_that_keeps_them(ranks, tmp_path):
    from diptych.parallel import storage

    folder = tmp_path / "step-00000000"
    ranks(1).run(save_plainly, folder=folder)
    with pytest.raises(AssertionError, match=r"optimizer\.gain\.ema is missing"):
        ranks(1).run(load, layout=Layout(), folder=folder)
    with pytest.raises(Exception, match=r"no mean of the weights \(EMA\).*train\.ema_decay"):
        storage.read_weights(folder, weights="ema")


def save_plainly(folder):
    from diptych.parallel import storage

    engine, world = engine_of(Layout())
    storage.save(folder, tensors=engine.tensors(), state={}, world=world)


def test_without_a_decay_nothing_follows():
    model = nn.Linear(2, 2)
    optimizer = build_optimizer(model, spec=SPEC)
    follow(optimizer)
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    assert set(optimizer.state[model.weight]) == {"step", "exp_avg", "exp_avg_sq"}


def test_states_that_are_there_stay():
    model = nn.Linear(2, 2)
    optimizer = build_optimizer(model, spec=SPEC)
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    before = optimizer.state[model.weight]["exp_avg"].clone()
    make_states(optimizer)
    assert torch.equal(optimizer.state[model.weight]["exp_avg"], before)
    set_steps(optimizer, num_steps=7)
    assert float(optimizer.state[model.weight]["step"]) == 7
