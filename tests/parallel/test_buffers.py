"""Input buffers: the same gradient, the same memory again, and a bound on how many are kept."""

from __future__ import annotations

from dataclasses import fields
from functools import partial

import numpy as np
import pytest
import torch

from diptych.core.records import Layout, MemoryOptions, OptimizerSpec
from diptych.data.batcher import Batcher
from diptych.data.collate import Multiples
from diptych.data.processor import read_processor_info
from diptych.data.schedule.ragged import pack_rows
from diptych.model.assemble import build
from diptych.model.families import units
from diptych.parallel.buffers import InputBuffers, place_on
from diptych.parallel.mesh import World
from diptych.parallel.spread import spread
from diptych.train.optimizers import build_optimizer
from diptych.train.step import LossModule, forward, run_step
from tests.conftest import TINY_MODEL

CPU = torch.device("cpu")
WORLD = World(rank=0, size=1, device=CPU)


@pytest.fixture(scope="module")
def batches(corpus):
    """Ragged micro-batches of two rows, of few shapes."""
    batcher = Batcher(
        shards=corpus.shards,
        manifest=corpus.manifest,
        processor=corpus.processor,
        split="train",
        multiples=Multiples(tokens=64, patches=256),
    )
    rows = [[np.array([2 * at]), np.array([2 * at + 1])] for at in range(6)]
    return [batcher.make(pack_rows(each))[0] for each in rows]


def tensors(batch):
    values = {field.name: getattr(batch, field.name) for field in fields(batch)}
    return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}


def engine(corpus, *, memory=MemoryOptions()):  # noqa: B008 - frozen
    info = read_processor_info(corpus.processor)
    model = build(TINY_MODEL, tokens=info.tokens, image=info.image, seed=0)
    return spread(
        LossModule(model),
        model=model,
        units=units(model),
        layout=Layout(memory=memory),
        world=WORLD,
        build_optimizer=partial(build_optimizer, spec=OptimizerSpec()),
    )


def test_what_is_placed_is_what_came(batches):
    place = InputBuffers(CPU).place
    for batch in batches:
        placed = place(batch)
        for name, tensor in tensors(batch).items():
            assert torch.equal(getattr(placed, name), tensor)
            assert getattr(placed, name).data_ptr() != tensor.data_ptr()
        assert placed.num_label_tokens == batch.num_label_tokens


def test_a_shape_is_allocated_once(batches):
    buffers = InputBuffers(CPU)
    for batch in batches:
        buffers.place(batch)
    shapes = {(name, each.shape) for batch in batches for name, each in tensors(batch).items()}
    assert buffers.num_allocated == buffers.num_buffers == len(shapes)
    where = {name: each.data_ptr() for name, each in tensors(buffers.place(batches[0])).items()}
    again = buffers.place(batches[0])
    assert where == {name: each.data_ptr() for name, each in tensors(again).items()}
    assert buffers.num_allocated == len(shapes)


@pytest.mark.parametrize("recompute", ["none", "blocks"])
def test_accumulated_micro_batches_have_the_gradient_of_fresh_tensors(corpus, batches, recompute):
    """Every micro-batch of the step overwrites the one before, in the same buffers."""
    found = []
    for place in (place_on(CPU, reuse=False), place_on(CPU, reuse=True)):
        used = engine(corpus, memory=MemoryOptions(recompute=recompute))
        norms = [
            run_step(
                batches,
                engine=used,
                num_label_tokens=100,
                lr=1e-3,
                max_grad_norm=1.0,
                place=place,
            ).update.grad_norm
            for _ in range(3)
        ]
        found.append((norms, [each.detach().clone() for each in used.model.parameters()]))
    assert found[0][0] == found[1][0]
    for expected, same in zip(found[0][1], found[1][1], strict=True):
        assert torch.equal(expected, same)


def test_a_graph_that_is_kept_too_long_is_noticed(corpus, batches):
    """A buffer that backward still needs cannot be overwritten in silence."""
    place, used = InputBuffers(CPU).place, engine(corpus)
    loss, _ = forward(used, batch=place(batches[0]))
    place(batches[0])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_few_shapes_are_kept_the_newest(batches, caplog):
    buffers = InputBuffers(CPU, max_shapes=2)
    batch = batches[0]
    for length in (8, 16, 24, 16):
        buffers.place(batch.change(lambda _, tensor, n=length: tensor.new_zeros(n)))
    num_fields = len(tensors(batch))
    assert buffers.num_buffers == 2 * num_fields
    assert buffers.num_allocated == 3 * num_fields
    assert caplog.text.count("has more than 2 shapes") == 1
    assert "memory.token_multiple" in caplog.text


def test_without_reuse_every_micro_batch_is_moved(batches):
    moved = place_on(torch.device("meta"), reuse=False)(batches[0])
    assert all(tensor.is_meta for tensor in tensors(moved).values())
