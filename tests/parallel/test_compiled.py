"""Compiled blocks: the same loss, graphs that are counted and bounded, and eager past the bound.

Quick tests let dynamo make graphs and run them as they are; slow ones have inductor compile them.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from diptych.core.errors import LayoutError
from diptych.core.records import (
    CompileOptions,
    Layout,
    MemoryOptions,
    OptimizerSpec,
)
from diptych.data.batcher import Batcher
from diptych.data.collate import Multiples
from diptych.data.processor import read_processor_info
from diptych.data.schedule.ragged import pack_rows
from diptych.model.assemble import build
from diptych.model.families import Unit, units
from diptych.parallel import compiled, recompute
from diptych.parallel.mesh import World
from diptych.parallel.spread import spread
from diptych.train.optimizers import build_optimizer
from diptych.train.step import LossModule, forward, run_step
from tests.conftest import TINY_MODEL

pytestmark = pytest.mark.filterwarnings(
    # Dynamo looks at it on its way.
    "ignore:The .grad attribute of a Tensor:UserWarning"
)
WIDTH = 6


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + torch.relu(self.mlp(self.norm(x)))


class ByImage(nn.Module):
    """Sums within images, as attention mixes patches: how many there are is data."""

    def forward(self, x, *, cu_seqlens):
        lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).tolist()
        return torch.cat([part.cumsum(0) for part in x.split(lengths)])


class VisionBlock(Block):
    def __init__(self):
        super().__init__()
        self.attn = ByImage()

    def forward(self, x, *, cu_seqlens):
        return super().forward(x + self.attn(self.norm(x), cu_seqlens=cu_seqlens))


def make(kind, *, num_blocks=3, memory=None, **options):
    """Blocks of one tower, compiled or not, and what calls them one after the other."""
    torch.manual_seed(0)
    blocks = nn.ModuleList(kind() for _ in range(num_blocks))
    tower = "vision" if kind is VisionBlock else "language"
    listed = [
        Unit(name=str(depth), module=block, tower=tower, depth=depth)
        for depth, block in enumerate(blocks)
    ]
    if options:
        given = CompileOptions(blocks=(tower,), **options)
        compiled.apply(listed, options=given, backend="eager")
    if memory:
        recompute.apply(listed, options=memory)

    def run(x, **arguments):
        blocks.zero_grad()
        # As what comes from an embedding.
        x = x * torch.ones((), requires_grad=True)
        for block in blocks:
            x = block(x, **arguments)
        if x.requires_grad:
            x.square().sum().backward()
        return x.detach(), [each.grad for each in blocks.parameters()]

    return run, blocks


def recompiles(run, *arguments, **named):
    before = compiled.num_recompiles() or 0
    run(*arguments, **named)
    return compiled.num_recompiles() - before


def test_nothing_is_counted_where_nothing_is_compiled(monkeypatch):
    monkeypatch.setattr(compiled, "_towers", [])
    compiled.apply([], options=CompileOptions())
    assert compiled.num_recompiles() is None


@pytest.mark.parametrize("shapes", ["dynamic", "static"])
@pytest.mark.parametrize("memory", [None, MemoryOptions(recompute="blocks")])
def test_the_same_numbers(shapes, memory):
    run, _ = make(Block, shapes=shapes, memory=memory)
    plain, _ = make(Block)
    for length in (3, 5):
        x = torch.randn(2, length, WIDTH)
        for found, expected in zip(run(x)[1], plain(x)[1], strict=True):
            torch.testing.assert_close(found, expected)


def test_blocks_share_a_graph_and_a_shape_makes_another():
    run, _ = make(Block, num_blocks=4, shapes="static")
    assert recompiles(run, torch.randn(2, 3, WIDTH)) == 0
    assert recompiles(run, torch.randn(2, 4, WIDTH)) == 1
    assert recompiles(run, torch.randn(2, 3, WIDTH)) == 0
    with torch.no_grad():
        assert recompiles(run, torch.randn(2, 3, WIDTH)) == 1


def test_dynamic_shapes_need_no_other_graph():
    run, _ = make(Block, shapes="dynamic")
    run(torch.randn(2, 3, WIDTH))
    for length in (4, 5, 9, 17):
        assert recompiles(run, torch.randn(3, length, WIDTH)) == 0


def test_past_the_bound_blocks_run_uncompiled_and_that_is_said_once(caplog):
    run, _ = make(Block, shapes="static", max_recompiles=2)
    plain, _ = make(Block)
    for length in (3, 4, 5, 6, 7, 8):
        x = torch.randn(2, length, WIDTH)
        for found, expected in zip(run(x)[1], plain(x)[1], strict=True):
            torch.testing.assert_close(found, expected)
    tower = compiled._towers[-1]
    assert tower.num_recompiles == 2
    said = [each for each in caplog.records if each.name == compiled.__name__]
    assert len(said) == 1
    assert "language tower have been compiled 3 times" in said[0].getMessage()


def test_the_bound_is_this_tower_s_alone():
    """What else is compiled in the process keeps torch's own limit."""
    limit = torch._dynamo.config.recompile_limit
    run, _ = make(Block, shapes="static", max_recompiles=1)
    for length in (3, 4, 5):
        run(torch.randn(2, length, WIDTH))
    assert torch._dynamo.config.recompile_limit == limit
    other, _ = make(Block, shapes="static", max_recompiles=3)
    assert [recompiles(other, torch.randn(2, length, WIDTH)) for length in (3, 4, 5)] == [0, 1, 1]


@pytest.mark.parametrize("memory", [None, MemoryOptions(recompute="blocks")])
def test_the_number_of_images_is_no_shape(memory):
    """However patches are split into images: with equally many of them there is one graph."""
    run, _ = make(VisionBlock, shapes="static", memory=memory)
    plain, _ = make(VisionBlock)
    counts = []
    for ends in ([0, 12], [0, 4, 12], [0, 2, 7, 9, 12], [0, 12]):
        x, cu_seqlens = torch.randn(12, WIDTH), torch.tensor(ends)
        counts.append(recompiles(run, x, cu_seqlens=cu_seqlens))
        for found, expected in zip(
            run(x, cu_seqlens=cu_seqlens)[1], plain(x, cu_seqlens=cu_seqlens)[1], strict=True
        ):
            torch.testing.assert_close(found, expected)
    assert counts == [0, 0, 0, 0]
    assert sum(map(len, compiled._towers[-1]._graphs.values())) > 0, "it must have been compiled"


def test_names_and_modules_stay():
    _, blocks = make(Block, shapes="dynamic")
    _, plain = make(Block)
    assert list(blocks.state_dict()) == list(plain.state_dict())
    assert type(blocks[0]) is Block


def test_without_a_compiler_nothing_starts(monkeypatch):
    from torch._inductor import config

    monkeypatch.setattr(config.cpp, "cxx", ("no-such-compiler",))
    unit = Unit(name="0", module=Block(), tower="language", depth=0)
    with pytest.raises(LayoutError, match=r"needs a C\+\+ compiler.*Install g\+\+"):
        compiled.apply([unit], options=CompileOptions(blocks=("language",)))


def trajectory(corpus, *, layout, num_steps, multiples, with_heldout=True):
    """Train a tiny model over ragged rows, and look at some without gradient, on this rank."""
    import torch.distributed as dist

    size = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if size > 1 else 0
    info = read_processor_info(corpus.processor)
    model = build(TINY_MODEL, tokens=info.tokens, image=info.image, seed=0)
    engine = spread(
        LossModule(model),
        model=model,
        units=units(model),
        layout=layout,
        world=World(rank=rank, size=size, device=torch.device("cpu")),
        build_optimizer=partial(build_optimizer, spec=OptimizerSpec()),
    )
    batcher = Batcher(
        shards=corpus.shards,
        manifest=corpus.manifest,
        processor=corpus.processor,
        split="train",
        multiples=multiples,
    )
    losses, counts = [], []
    for step in range(num_steps):
        first = 4 * (step * size + rank)
        rows = [[np.array([first + at]), np.array([first + at + 1])] for at in (0, 2)]
        batches = [batcher.make(pack_rows(part))[0] for part in rows]
        engine.module.train()
        result = run_step(batches, engine=engine, num_label_tokens=200, lr=1e-3, max_grad_norm=1.0)
        losses.append(result.loss_sum)
        if with_heldout:
            engine.module.eval()
            with torch.no_grad():
                losses.append(float(forward(engine, batch=batches[0])[0]))
        counts.append(compiled.num_recompiles())
    return losses, counts


STATIC = {"shapes": "static", "blocks": ("vision", "language")}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("layout", "options", "tolerance"),
    [
        ({}, {**STATIC, "shapes": "dynamic"}, 1e-5),
        ({}, STATIC, 1e-5),
        ({"memory": MemoryOptions(recompute="blocks")}, STATIC, 1e-5),
        (
            {"memory": MemoryOptions(recompute="operators")},
            {**STATIC, "blocks": ("language",)},
            1e-5,
        ),
        ({"precision": "bf16"}, STATIC, 2e-2),
    ],
    ids=["dynamic", "static", "blocks", "operators", "bf16"],
)
def test_the_same_loss_by_inductor_in_few_graphs(layout, options, tolerance, corpus):
    multiples = Multiples(tokens=128, patches=512)
    arguments = {"corpus": corpus, "num_steps": 4, "multiples": multiples}
    plain, _ = trajectory(layout=Layout(**layout), **arguments)
    before = compiled.num_recompiles() or 0
    given = CompileOptions(**options)
    found, counts = trajectory(layout=Layout(**layout, compile=given), **arguments)
    np.testing.assert_allclose(found, plain, rtol=tolerance)
    # Every graph is there after the first steps, and ragged rows need no other.
    assert 0 < counts[-1] - before <= 3 * given.max_recompiles
    assert counts[-1] == counts[-2]


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{"engine": "fsdp2", "shard": 2}, {"dp": 2}], ids=["fsdp2", "ddp"])
def test_ranks_compile_blocks_that_are_sharded_or_copied(axes, corpus, ranks):
    """One tower and one shape, so that it ends before the pool of ranks gives up on it."""
    arguments = {
        "corpus": corpus,
        "num_steps": 3,
        "multiples": Multiples(tokens=256, patches=1024),
        "with_heldout": False,
    }
    plain = ranks(2).run(trajectory, layout=Layout(**axes), **arguments)
    given = CompileOptions(blocks=("language",), shapes="static")
    found = ranks(2).run(trajectory, layout=Layout(**axes, compile=given), **arguments)
    for (losses, counts), (expected, _) in zip(found, plain, strict=True):
        np.testing.assert_allclose(losses, expected, rtol=1e-5)
        assert counts[-1] is not None
        assert counts[-1] == counts[0], "one shape, one graph"
