"""What a model's modules do not allow is refused, with what is allowed and what to do."""

from __future__ import annotations

import pytest

from diptych.core.records import CompileOptions, Layout, MemoryOptions, ZeroOptions
from diptych.plan.modules import refusal

VISION = ("model.visual.blocks.0.norm",)


def refused(layout, *, shape, num_micro_batches=1):
    return refusal(layout, model_shape=shape, num_micro_batches=num_micro_batches)


@pytest.fixture
def shape(starter_shape):
    return starter_shape.model_copy(update={"batch_norms": VISION})


def test_without_batch_norms_nothing_is_asked(starter_shape):
    for setting in ("refuse", "frozen", "sync"):
        assert refused(Layout(batch_norm=setting), shape=starter_shape) is None


SYNC = {"batch_norm": "sync", "device": "cuda"}
BLOCKS = MemoryOptions(recompute="blocks")


@pytest.mark.parametrize(
    ("layout", "num_micro_batches", "message"),
    [
        ({}, 1, r"1 batch norm\(s\) \(model.visual.blocks.0.norm\).*batch_norm to frozen"),
        ({"batch_norm": "sync"}, 1, "GPUs only; set it to frozen"),
        ({**SYNC, "engine": "zero"}, 1, "zero's checkpoints"),
        (SYNC, 2, "with 2 micro-batches a step.*raise micro_batch"),
        ({**SYNC, "memory": BLOCKS}, 1, "recomputing the vision.*memory.recompute to none"),
    ],
)
def test_batch_norms(layout, num_micro_batches, message, shape):
    import re

    found = refused(Layout(**layout), shape=shape, num_micro_batches=num_micro_batches)
    assert found
    assert re.search(message, found)


@pytest.mark.parametrize(
    "layout",
    [
        {"batch_norm": "frozen", "memory": BLOCKS},
        SYNC,
        {**SYNC, "memory": BLOCKS.model_copy(update={"vision_every": 0})},
    ],
)
def test_batch_norms_that_can_be(layout, shape):
    assert refused(Layout(**layout), shape=shape) is None


@pytest.mark.parametrize(("stage", "runs"), [(1, True), (2, True), (3, False)])
def test_zero_3_cannot_be_compiled(stage, runs, starter_shape):
    layout = Layout(
        engine="zero",
        zero=ZeroOptions(stage=stage),
        compile=CompileOptions(blocks=("language",)),
    )
    found = refused(layout, shape=starter_shape)
    assert found is None if runs else "use engine fsdp2 or a lower zero.stage" in (found or "")


@pytest.mark.parametrize(
    ("blocks", "memory", "runs"),
    [
        (("vision",), {"recompute": "operators"}, False),
        (("vision",), {"recompute": "operators", "vision_every": 0}, True),
        (("vision",), {"recompute": "blocks"}, True),
        (("language",), {"recompute": "operators"}, True),
    ],
)
def test_blocks_that_are_two_graphs_recompute_as_a_whole(blocks, memory, runs, starter_shape):
    layout = Layout(compile=CompileOptions(blocks=blocks), memory=MemoryOptions(**memory))
    found = refused(layout, shape=starter_shape)
    assert found is None if runs else "use recompute blocks" in (found or "")


@pytest.mark.parametrize(("multiple", "runs"), [(None, True), (64, True), (66, False)])
def test_patches_are_those_of_whole_tokens(multiple, runs, starter_shape):
    layout = Layout(memory=MemoryOptions(patch_multiple=multiple))
    found = refused(layout, shape=starter_shape)
    assert found is None if runs else "multiple of 4, or to null" in (found or "")
