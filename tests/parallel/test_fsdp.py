"""FSDP2's groups, gathers and prefetches are those of the layout."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from diptych.core.records import FsdpOptions, Layout, MixedPrecision
from tests.conftest import TINY_MODEL
from tests.parallel.small import make_inputs, spread_model, step

BLOCKS = [
    *(f"model.visual.blocks.{number}" for number in range(2)),
    *(f"model.language_model.layers.{number}" for number in range(2)),
]
MERGERS = ["model.visual.merger", "model.visual.deepstack_merger_list.0"]
UNTIED = TINY_MODEL.model_copy(update={"tie_word_embeddings": False})


def fsdp(shard=2, dp=1, precision="fp32", mixed=None, **options):
    return Layout(
        engine="fsdp2",
        dp=dp,
        shard=shard,
        precision=precision,
        fsdp=FsdpOptions(**options),
        mixed_precision=MixedPrecision(**(mixed or {})),
    )


def is_sharded(module):
    from torch.distributed.tensor import DTensor

    return isinstance(next(module.parameters()), DTensor)


def group_names(layout, spec=TINY_MODEL):
    from torch.distributed.fsdp import FSDPModule

    engine = spread_model(layout, spec=spec)
    modules = engine.model.named_modules()
    assert isinstance(engine.module, FSDPModule)
    assert step(engine).applied
    return sorted(name for name, module in modules if isinstance(module, FSDPModule))


@pytest.mark.parametrize("spec", [TINY_MODEL, UNTIED], ids=["tied", "untied"])
def test_blocks_are_groups_and_the_rest_is_the_roots(ranks, spec):
    assert ranks(2).run(group_names, layout=fsdp(), spec=spec)[0] == sorted(BLOCKS)


@pytest.mark.parametrize(
    ("wrap", "expected"),
    [
        (["Qwen3VLTextDecoderLayer"], BLOCKS[2:]),
        (["Qwen3VLVisionBlock", "Qwen3VLVisionPatchMerger"], [*BLOCKS[:2], *MERGERS]),
        (
            ["Qwen3VLTextDecoderLayer", "Qwen3VLTextMLP"],
            [*BLOCKS[2:], *(f"{block}.mlp" for block in BLOCKS[2:])],
        ),
        (["Qwen3VLVisionModel"], ["model.visual"]),
    ],
    ids=["one class", "two classes", "nested", "a tower"],
)
def test_groups_are_the_layers_of_the_classes_that_are_named(ranks, wrap, expected):
    assert ranks(2).run(group_names, layout=fsdp(wrap=wrap))[0] == sorted(expected)


def test_a_tower_of_its_own_dtype_is_in_groups_of_its_own(ranks):
    layout = fsdp(precision="bf16", mixed={"towers": {"vision": "fp32"}})
    rest = ["model.visual.patch_embed.proj", "model.visual.pos_embed"]
    expected = sorted([*BLOCKS, *MERGERS, *rest])
    assert ranks(2).run(group_names, layout=layout)[0] == expected
    # A layer around towers of several dtypes is no group, but each part of it is.
    around = fsdp(
        precision="bf16", mixed={"towers": {"vision": "fp32"}}, wrap=["Qwen3VLVisionModel"]
    )
    expected = sorted([*BLOCKS[:2], *MERGERS, *rest])
    assert ranks(2).run(group_names, layout=around)[0] == expected


@pytest.mark.parametrize(
    ("wrap", "message"),
    [
        ("Qwen3VLTextDecoder", "no layer of class 'Qwen3VLTextDecoder'.*'Qwen3VLTextDecoderLayer'"),
        # The model looks tokens up in it from outside of its forward.
        ("Qwen3VLTextModel", "no layer of class 'Qwen3VLTextModel' that can be sharded"),
    ],
)
def test_a_class_that_cannot_be_wrapped_is_refused(ranks, wrap, message):
    with pytest.raises(AssertionError, match=message):
        ranks(2).run(spread_model, layout=fsdp(wrap=[wrap]))


def test_a_head_of_its_own_dtype_is_refused_where_it_is_tied(ranks):
    layout = fsdp(precision="bf16", mixed={"towers": {"head": "fp32"}})
    with pytest.raises(AssertionError, match="FSDP2 gathers both in one dtype"):
        ranks(2).run(spread_model, layout=layout)
    assert "lm_head" in ranks(2).run(group_names, layout=layout, spec=UNTIED)[0]


def gathered_between(layout):
    """Say whether a block and the root are whole after a forward, then after its backward."""
    engine = spread_model(layout)
    step(engine)
    block, root = engine.model.get_submodule(BLOCKS[2]), engine.model.get_submodule("lm_head")
    with engine.micro_batch(is_last=True):
        loss, _ = engine.module(**make_inputs())
        between = [not is_sharded(block), not is_sharded(root)]
        engine.backward(loss, weight=1.0)
    return between, [not is_sharded(block), not is_sharded(root)]


@pytest.mark.parametrize(("gather", "stays"), [("twice", False), ("once", True)])
def test_gathered_once_a_block_stays_whole_until_its_backward(ranks, gather, stays):
    between, after = ranks(2).run(gathered_between, layout=fsdp(gather=gather))[0]
    assert between == [stays, True]
    assert after == [False, False]


def gathered_ahead(layout):
    """List which groups are gathered, or on their way, when each group begins."""
    engine = spread_model(layout)
    step(engine)
    modules = {name: engine.model.get_submodule(name) for name in BLOCKS}
    seen = {}

    def state_of(module):
        (group,) = module._get_fsdp_state()._fsdp_param_groups
        return group.is_unsharded or group._all_gather_result is not None

    def look(when):
        if when not in seen:
            seen[when] = [name for name, module in modules.items() if state_of(module)]

    for name, module in modules.items():
        # Both run after FSDP2's own hooks.
        module.register_forward_pre_hook(lambda *_, name=name: look(("forward", name)))
        last = [each for each in module.modules() if isinstance(each, nn.Linear)][-1]
        last.register_full_backward_pre_hook(lambda *_, name=name: look(("backward", name)))
    step(engine)
    return seen


@pytest.mark.parametrize(
    ("options", "forward", "backward"),
    [
        ({}, 0, 1),
        ({"prefetch_forward": 1, "prefetch_backward": 0}, 1, 0),
        ({"prefetch_forward": 2, "prefetch_backward": 2}, 2, 2),
    ],
)
def test_so_many_groups_are_gathered_ahead(ranks, options, forward, backward):
    seen = ranks(2).run(gathered_ahead, layout=fsdp(**options))[0]
    for number, name in enumerate(BLOCKS):
        assert seen["forward", name] == BLOCKS[number : number + 1 + forward]
        assert seen["backward", name] == BLOCKS[max(0, number - backward) : number + 1]


def tensors_around_a_heldout_forward(layout):
    """Return a checkpoint's tensors before and after a forward that has no backward."""
    from torch.distributed.tensor import DTensor

    def whole():
        return {
            name: (each.full_tensor() if isinstance(each, DTensor) else each).numpy().copy()
            for name, each in engine.tensors().items()
        }

    engine = spread_model(layout)
    step(engine)
    before = whole()
    engine.module.eval()
    with torch.no_grad(), engine.autocast():
        engine.module(**make_inputs())
    engine.module.train()
    after = whole()
    assert step(engine).applied
    return before, after


@pytest.mark.parametrize("gather", ["twice", "once"])
def test_a_checkpoint_after_a_heldout_forward_holds_the_moments(ranks, gather):
    before, after = ranks(2).run(tensors_around_a_heldout_forward, layout=fsdp(gather=gather))[0]
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert (tensor == after[name]).all(), name
    moment = after["optimizer.model.language_model.embed_tokens.weight.exp_avg_sq"]
    assert moment.max() > 0


def offloaded(layout):
    engine = spread_model(layout)
    assert step(engine, num_micro_batches=2).applied
    states = [engine.module, *(engine.model.get_submodule(name) for name in BLOCKS)]
    groups = [group for each in states for group in each._get_fsdp_state()._fsdp_param_groups]
    return {(p.offload_to_cpu, p.pin_memory) for group in groups for p in group.fsdp_params}


@pytest.mark.parametrize("offload", [False, True])
def test_offload_is_every_groups(ranks, offload):
    # Nothing is pinned for ranks on a CPU.
    assert ranks(2).run(offloaded, layout=fsdp(offload=offload)) == [{(offload, False)}] * 2


def placements(layout):
    engine = spread_model(layout)
    step(engine)
    parameter = next(engine.model.parameters())
    return tuple(parameter.device_mesh.shape), [str(each) for each in parameter.placements]


def test_copies_of_shards_are_a_mesh_of_two_axes(ranks):
    found = ranks(4).run(placements, layout=fsdp(dp=2, shard=2))[3]
    assert found == ((2, 2), ["R", "S(0)"])
    assert ranks(2).run(placements, layout=fsdp())[0] == ((2,), ["S(0)"])
