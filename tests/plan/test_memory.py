"""Bytes against textbook figures, and activations against what autograd saves."""

import pytest
import torch

from diptych.core.records import (
    FsdpOptions,
    HeldBytes,
    ImageSettings,
    Layout,
    ModelShape,
    ModelSpec,
    Parameter,
    TokenIds,
    ZeroOptions,
)
from diptych.model.assemble import build
from diptych.model.inspect import inspect
from diptych.plan.memory import gathered_bytes, held_bytes, host_bytes, peak_bytes
from diptych.shape.activations import activation_bytes
from diptych.shape.counts import BatchCounts

GB = 1_000_000_000


@pytest.mark.parametrize(
    ("num_billions", "layout", "held_gb"),
    [
        (7, Layout(engine="ddp", dp=8), 112),
        (7, Layout(engine="ddp", dp=8, precision="bf16"), 112),
        (7, Layout(engine="fsdp2", shard=8), 14),
        (13, Layout(engine="fsdp2", shard=4), 52),
        (13, Layout(engine="fsdp2", dp=2, shard=4), 52),
    ],
)
def test_held_bytes_are_sixteen_a_parameter(model_of_size, num_billions, layout, held_gb):
    """And one counter of 4 bytes for each of the ten tensors."""
    shape = model_of_size(num_billions * GB)
    held = held_bytes(shape, layout=layout)
    assert held.total == held_gb * GB + 40
    assert held.parameters == held.gradients == held_gb * GB // 4


@pytest.mark.parametrize(
    ("layout", "held_gb"),
    [
        # bf16 weights 2, the rank's part of fp32 weight 4 and moments 8, all fp32 gradients 4.
        (Layout(engine="zero", shard=4, precision="bf16", zero={"stage": 1}), 2 + 12 / 4 + 4),
        # Of gradients the rank's part only.
        (Layout(engine="zero", shard=4, precision="bf16", zero={"stage": 2}), 2 + 12 / 4 + 4 / 4),
        # Of weights too; and a bucket of 0.5 G fp32 gradients that is always there.
        (Layout(engine="zero", shard=4, precision="bf16", zero={"stage": 3}), 18 / 4 + 4 * 0.5),
    ],
)
def test_held_bytes_of_zero_stages(model_of_size, layout, held_gb):
    shape = model_of_size(GB)
    assert held_bytes(shape, layout=layout).total == pytest.approx(held_gb * GB, abs=40)


def shape_of(*parameters, frozen=()):
    """A model of parameters given as (block, shape)."""
    return ModelShape(
        family="qwen3_vl",
        parameters=tuple(
            Parameter(
                name=f"model.{block or 'root'}.{number}.weight",
                shape=shape,
                dtype="float32",
                tower="vision" if block.startswith("v") else "language",
                block=block,
                trains=not (block.startswith("v") and "vision" in frozen),
            )
            for number, (block, shape) in enumerate(parameters)
        ),
        sizes={},
        tied_parameters={},
    )


def test_every_parameter_is_padded_by_itself():
    """10 rows over 4 ranks are 3, 3, 3, 1; one row is 1, 0, 0, 0; each rank keeps 3 and 1 rows."""
    shape = shape_of(("a", (10, 5)), ("b", (1, 7)))
    layout = Layout(engine="fsdp2", shard=4)
    for rank, num_local in enumerate((15 + 7, 15, 15, 5)):
        held = held_bytes(shape, layout=layout, rank=rank)
        assert held.parameters == held.gradients == 4 * (15 + 7)
        assert held.optimizer == 8 * num_local + 2 * 4


def test_frozen_towers_hold_weights_alone():
    shape = shape_of(("v0", (10, 10)), ("l0", (8, 8)), frozen=("vision",))
    held = held_bytes(shape, layout=Layout(engine="ddp", dp=2))
    assert held == HeldBytes(parameters=4 * 164, gradients=4 * 64, optimizer=8 * 64 + 4)
    halves = held_bytes(shape, layout=Layout(engine="fsdp2", shard=2))
    assert halves == HeldBytes(parameters=4 * 82, gradients=4 * 32, optimizer=8 * 32 + 4)


def test_separate_buckets_hold_gradients_twice(model_of_size):
    layout = Layout(engine="ddp", dp=2, ddp={"gradient_as_bucket_view": False})
    assert held_bytes(model_of_size(GB), layout=layout).gradients == 8 * GB
    alone = layout.model_copy(update={"dp": 1})
    assert held_bytes(model_of_size(GB), layout=alone).gradients == 4 * GB


def test_what_is_offloaded_lies_on_the_host(model_of_size):
    """Two ranks share 16 GB of states; on a CPU there is nowhere else for them to lie."""
    shape = model_of_size(GB)
    counts = BatchCounts.of([50], image_patches=[], num_head_tokens=20)
    given = {"counts": counts, "num_micro_batches": 1}
    fields = {"engine": "fsdp2", "shard": 2, "fsdp": {"offload": True}}
    layout = Layout(**fields, device="cuda")
    assert host_bytes(shape, layout=layout, **given) == 8 * GB + 40
    here = layout.model_copy(update={"fsdp": FsdpOptions()})
    assert host_bytes(shape, layout=here, **given) == 0
    saved = peak_bytes(shape, layout=here, **given) - peak_bytes(shape, layout=layout, **given)
    assert saved == pytest.approx(8 * GB, abs=100)
    assert host_bytes(shape, layout=Layout(**fields), **given) == 0
    memory = {"offload_activations": True}
    zero = Layout(engine="zero", shard=2, device="cuda", precision="bf16", memory=memory)
    cpu = zero.model_copy(update={"zero": ZeroOptions(optimizer={"to": "cpu"})})
    activations = activation_bytes(shape, counts=counts, precision="bf16")
    assert host_bytes(shape, layout=zero, **given) == pytest.approx(activations, abs=1)
    # A part of fp32 weights and moments, 12, gradients, 4, and of bf16 weights, 2; one gradient.
    held = 18 * GB / 2 + 2 * GB / 10
    assert host_bytes(shape, layout=cpu, **given) == pytest.approx(held + activations, abs=100)


def test_gathered_bytes_worked_by_hand(model_of_size):
    """Ten blocks of 100 M, no root: two blocks' weights at 4 bytes and one's gradients at 4."""
    shape = model_of_size(GB)

    def gathered(num_micro_batches=1, **fields):
        layout = Layout(**fields)
        return gathered_bytes(shape, layout=layout, num_micro_batches=num_micro_batches)

    assert gathered(engine="ddp", dp=2) == 0
    assert gathered(engine="ddp", dp=2, precision="bf16") == 2 * GB
    # Gradients that wait lie beside the buckets.
    assert gathered(2, engine="ddp", dp=2) == 4 * GB
    assert (
        gathered(2, engine="ddp", dp=1) == gathered(2, engine="ddp", dp=2, grad_sync="every") == 0
    )
    assert gathered(engine="fsdp2", shard=2) == 1.2 * GB
    assert gathered(engine="fsdp2", shard=2, precision="bf16") == 0.8 * GB
    assert gathered(2, engine="fsdp2", shard=2) == 5.2 * GB
    assert gathered(2, engine="fsdp2", shard=2, grad_sync="every") == 1.2 * GB
    # Three blocks ahead are four at a time; gathered once they all stay.
    ahead = {"fsdp": {"prefetch_backward": 3}}
    assert gathered(engine="fsdp2", shard=2, **ahead) == 2.0 * GB
    assert gathered(engine="fsdp2", shard=2, fsdp={"gather": "once"}) == 4.4 * GB


def test_peak_is_the_sum_of_its_parts(model_of_size):
    shape, layout = model_of_size(GB), Layout(engine="fsdp2", shard=2)
    counts = BatchCounts.of([50] * 4, image_patches=[48] * 4, num_head_tokens=20)
    activations = activation_bytes(shape, counts=counts, precision="fp32")
    peak = peak_bytes(shape, layout=layout, counts=counts, num_micro_batches=1)
    assert peak == pytest.approx(8 * GB + 1.2 * GB + activations + 0.85 * GB, abs=100)


SIZES = {
    "text": {
        "vocab_size": 512,
        "hidden_size": 96,
        "intermediate_size": 320,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 32,
    },
    "vision": {
        "depth": 3,
        "hidden_size": 64,
        "num_heads": 4,
        "intermediate_size": 200,
        "patch_size": 8,
        "num_position_embeddings": 256,
        "deepstack_visual_indexes": [0, 1],
    },
}


def saved_bytes(model, *, bf16):
    """Run a batch of 2 x 60 tokens with an image of 8 x 12 patches each, 20 labels a row; add up
    what autograd saves, and what the text alone saves.
    """
    ids = torch.randint(10, 400, (2, 60))
    ids[:, 5 : 5 + 24] = 2
    kept = {}
    known = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16),
    ):
        hidden = model.model(
            input_ids=ids,
            position_ids=torch.arange(60).expand(3, 2, 60),
            pixel_values=torch.randn(192, 3 * 2 * 8 * 8),
            image_grid_thw=torch.tensor([[1, 8, 12], [1, 8, 12]]),
            attention_mask=None,
            use_cache=False,
        ).last_hidden_state
        logits = model.lm_head(hidden[:, :20]).float()
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, :20].flatten())
    return sum(num_bytes for num_bytes, _ in kept.values())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_activations_are_near_what_autograd_saves(precision):
    model = build(
        ModelSpec(sizes=SIZES),
        tokens=TokenIds(
            num_tokens=500, pad=0, eos=1, image=2, video=3, vision_start=4, vision_end=5
        ),
        image=ImageSettings(
            patch_px=8, merge=2, temporal_patch=2, min_area_px=64, max_area_px=65536
        ),
        seed=0,
    )
    saved = saved_bytes(model, bf16=precision == "bf16")
    counts = BatchCounts.of([60, 60], image_patches=[96, 96], num_head_tokens=40)
    shape = inspect(ModelSpec(sizes=SIZES))
    estimate = activation_bytes(shape, counts=counts, precision=precision)
    if precision == "bf16":
        # Autograd saves the weights' bf16 copies, which the planner counts beside activations.
        layout = Layout(engine="ddp", precision="bf16")
        estimate += gathered_bytes(shape, layout=layout, num_micro_batches=1)
    # The estimate also holds gradients in flight, which autograd does not save.
    assert saved <= estimate <= 1.25 * saved
