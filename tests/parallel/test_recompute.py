"""Recomputing changes no bit of a gradient, and holds less."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from diptych.core.errors import LayoutError
from diptych.core.records import ImageSettings, Layout, MemoryOptions, TokenIds, ZeroOptions
from diptych.model.assemble import build
from diptych.model.families import Unit, units
from diptych.parallel import recompute
from diptych.train.step import LossModule
from tests.conftest import TINY_MODEL, TINY_PACKS, TINY_SCHEDULE
from tests.runs import make_spec, trajectory

TOKENS = TokenIds(num_tokens=500, pad=0, eos=1, image=2, video=3, vision_start=4, vision_end=5)
IMAGE = ImageSettings(patch_px=8, merge=2, temporal_patch=1, min_area_px=256, max_area_px=65536)
DEEP = TINY_MODEL.model_copy(
    update={
        "sizes": {
            "text": {**TINY_MODEL.sizes["text"], "num_hidden_layers": 4},
            "vision": {**TINY_MODEL.sizes["vision"], "depth": 3},
        }
    }
)
BLOCKS = {"recompute": "blocks"}
OPERATORS = {"recompute": "operators"}
ZERO_3 = ZeroOptions(stage=3, persistence_threshold_elements=0)
"""No weight stays gathered, so that recomputing has to find each."""
CHOICES = {
    "blocks": BLOCKS,
    "every second": {**BLOCKS, "language_every": 2, "vision_every": 2},
    "language only": {**BLOCKS, "vision_every": 0, "recompute_connector": False},
    "operators": OPERATORS,
    "operators of vision": {**OPERATORS, "language_every": 0, "recompute_connector": False},
}


def make_module(*, frozen=(), **options):
    """A model of 4 + 3 blocks whose units recompute."""
    model = build(DEEP, tokens=TOKENS, image=IMAGE, seed=5)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(tuple(frozen)))
    module = LossModule(model).train()
    recompute.apply(units(model), options=MemoryOptions(**options))
    return module


def make_inputs():
    """Two rows of 24 tokens, an image of 4 tokens each."""
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(10, 400, (2, 24), generator=random)
    ids[:, 2:6] = TOKENS.image
    return {
        "input_ids": ids,
        "labels": torch.where(torch.arange(24) > 10, ids, -100),
        "position_ids": torch.arange(24).expand(3, 2, 24),
        "pixel_values": torch.randn(32, 3 * 8 * 8, generator=random),
        "grid_thw": torch.tensor([[1, 4, 4]] * 2),
        "source_ids": torch.zeros((2, 24), dtype=torch.int16),
    }


def gradients(module):
    module(**make_inputs())[0].backward()
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def num_calls(module, *, train=True):
    """Count how often each unit's first norm runs in forward and backward."""
    calls = Counter()

    def count(name):
        return lambda *_: calls.update([name])

    for unit in units(module.model):
        first = next(each for each in unit.module.modules() if not list(each.children()))
        first.register_forward_hook(count(unit.name))
    module.train(train)
    loss = module(**make_inputs())[0]
    if loss.requires_grad:
        loss.backward()
    return calls


@pytest.mark.parametrize("choice", CHOICES)
def test_no_bit_of_the_gradient_changes(choice):
    expected, found = gradients(make_module()), gradients(make_module(**CHOICES[choice]))
    assert expected.keys() == found.keys()
    for name, gradient in expected.items():
        assert torch.equal(gradient, found[name]), name


@pytest.mark.parametrize("what", ["blocks", "operators"])
def test_no_bit_changes_under_autocast(what):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected, found = make_module(), make_module(recompute=what)
        sums = [module(**make_inputs())[0] for module in (expected, found)]
    assert torch.equal(*sums)
    for loss in sums:
        loss.backward()
    for ours, theirs in zip(found.parameters(), expected.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


def test_every_kth_block_of_a_tower_runs_twice():
    vision, language = "model.visual.blocks", "model.language_model.layers"
    merger, level = "model.visual.merger", "model.visual.deepstack_merger_list.0"
    calls = num_calls(make_module(**BLOCKS, vision_every=2, language_every=3))
    assert calls == {
        f"{vision}.0": 2,
        f"{vision}.1": 1,
        f"{vision}.2": 2,
        f"{language}.0": 2,
        f"{language}.1": 1,
        f"{language}.2": 1,
        f"{language}.3": 2,
        merger: 2,
        level: 2,
    }
    calls = num_calls(make_module(**BLOCKS, vision_every=0, recompute_connector=False))
    assert {name for name, times in calls.items() if times == 2} == {
        f"{language}.{depth}" for depth in range(4)
    }


def test_without_training_nothing_is_recomputed():
    assert set(num_calls(make_module(**BLOCKS), train=False).values()) == {1}
    with torch.no_grad():
        assert set(num_calls(make_module(**BLOCKS)).values()) == {1}


@pytest.mark.parametrize("what", ["blocks", "operators"])
def test_a_frozen_tower_is_no_trouble(what):
    frozen = ("model.visual.blocks", "model.visual.p")
    expected = gradients(make_module(frozen=frozen))
    module = make_module(frozen=frozen, recompute=what)
    found = gradients(module)
    assert expected.keys() == found.keys()
    assert not any(name.startswith("model.model.visual.blocks") for name in found)
    assert all(torch.equal(expected[name], found[name]) for name in found)
    # Nothing in it needs a gradient, so nothing of it runs again.
    calls = num_calls(make_module(frozen=frozen, recompute=what))
    assert calls["model.visual.blocks.0"] == 1


def test_dropout_draws_the_same_again():
    def gradient(options):
        torch.manual_seed(0)
        block = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5), nn.Linear(16, 16)).train()
        unit = Unit(name="block", module=block, tower="language", depth=0)
        recompute.apply([unit], options=MemoryOptions(**options))
        block(torch.ones(4, 16, requires_grad=True)).square().sum().backward()
        return block[0].weight.grad

    assert torch.equal(gradient({}), gradient(BLOCKS))
    assert gradient({}).abs().sum() > 0


def test_a_batch_norm_is_refused_unless_frozen():
    block = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    unit = Unit(name="tower.0", module=block, tower="vision", depth=0)
    with pytest.raises(LayoutError, match=r"tower\.0 has a batch norm \(1\).*frozen"):
        recompute.apply([unit], options=MemoryOptions(**BLOCKS))
    block[1].eval()
    recompute.apply([unit], options=MemoryOptions(**BLOCKS))


@pytest.fixture
def live_bytes(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    from _live import LiveBytes

    return LiveBytes


def test_less_is_held(live_bytes):
    """What a whole forward pass leaves behind, counted as bytes of live tensors."""

    def held(**options):
        module, inputs = make_module(**options), make_inputs()
        with live_bytes() as live:
            loss = module(**inputs)
            now = live.now
            loss[0].backward()
        return now

    none, operators, second, blocks = (
        held(**each) for each in ({}, OPERATORS, CHOICES["every second"], BLOCKS)
    )
    assert blocks < 0.4 * none
    assert blocks < second < operators < none


@pytest.mark.parametrize("what", ["blocks", "operators"])
@pytest.mark.parametrize(
    ("layout", "schedule"),
    [
        ({"engine": "fsdp2", "shard": 2, "micro_batch": 2}, TINY_SCHEDULE),
        ({"engine": "fsdp2", "shard": 2, "micro_batch": 3, "precision": "bf16"}, TINY_PACKS),
        ({"engine": "ddp", "dp": 2, "micro_batch": 2}, TINY_SCHEDULE),
        ({"engine": "zero", "shard": 2, "micro_batch": 2, "zero": ZERO_3}, TINY_SCHEDULE),
    ],
    ids=["fsdp2", "fsdp2 in bf16, packed", "ddp", "zero 3"],
)
def test_real_ranks_follow_bit_by_bit(ranks, corpus, what, layout, schedule):
    found = []
    for memory in (MemoryOptions(), MemoryOptions(recompute=what)):
        spec = make_spec(
            corpus, layout=Layout(**layout, memory=memory), model=TINY_MODEL, schedule=schedule
        )
        found.append(ranks(2).run(trajectory, spec=spec, num_steps=3)[0])
    np.testing.assert_array_equal(found[0]["gradient"], found[1]["gradient"])
    np.testing.assert_array_equal(found[0]["losses"], found[1]["losses"])


def num_gathers(*, recompute):
    """Count the all-gathers of one forward and backward pass of two sharded blocks."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.debug import CommDebugMode

    from diptych.parallel import recompute as module

    torch.manual_seed(0)
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)))
    listed = [
        Unit(name=str(depth), module=each, tower="language", depth=depth)
        for depth, each in enumerate(blocks)
    ]
    module.apply(listed, options=MemoryOptions(recompute=recompute))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for each in (*blocks, blocks):
        fully_shard(each, mesh=mesh)
    with CommDebugMode() as counted:
        blocks(torch.ones(2, 8)).sum().backward()
    return {str(name): times for name, times in counted.get_comm_counts().items()}


def test_recomputing_gathers_nothing_again(ranks):
    """FSDP2's hooks lie outside: a block is gathered for its backward pass as it was anyway."""
    without, with_blocks = (
        ranks(2).run(num_gathers, recompute=what)[0] for what in ("none", "blocks")
    )
    assert with_blocks == without
    assert sum(times for name, times in without.items() if "gather" in name) >= 3
