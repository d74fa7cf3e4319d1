"""A setting that torch's layouts cannot follow is refused, with what to do."""

from __future__ import annotations

import pytest

from diptych.core.records import DdpOptions, FsdpOptions, Layout, MixedPrecision, ZeroOptions
from diptych.plan import native
from tests.plan.conftest import cpu_cluster, gpu_cluster, shape_of_size

SHAPE = shape_of_size(1000).model_copy(
    update={"layer_classes": ("VisionBlock", "VisionMLP", "TextLayer")}
)
TIED = SHAPE.model_copy(update={"tied_parameters": {"lm_head.weight": "embed_tokens.weight"}})
A100 = gpu_cluster("NVIDIA A100", 80, num_devices=2, flops_per_s={"bf16": 3e14, "fp32": 2e13})
H100 = gpu_cluster("NVIDIA H100", 80, num_devices=2, flops_per_s={"bf16": 1e15, "fp32": 7e13})
V100 = gpu_cluster("Tesla V100", 16, num_devices=2, flops_per_s={"fp16": 1e14, "fp32": 1e13})


def reason(layout, *, shape=SHAPE, cluster=None, num_micro_batches=2):
    return native.refusal(
        layout,
        model_shape=shape,
        cluster=cluster or cpu_cluster(4),
        num_micro_batches=num_micro_batches,
    )


def ddp(dp=2, *, grad_sync="last", precision="fp32", reduce="fp32", **options):
    return Layout(
        dp=dp,
        grad_sync=grad_sync,
        precision=precision,
        ddp=DdpOptions(**options),
        mixed_precision=MixedPrecision(reduce=reduce),
    )


def mixed(engine="fsdp2", device="cpu", precision="bf16", **options):
    axes = {"dp": 2} if engine == "ddp" else {"shard": 2}
    return Layout(
        engine=engine,
        **axes,
        device=device,
        precision=precision,
        mixed_precision=MixedPrecision(**options),
    )


POWER = {"compression": "powersgd"}
LOCAL = {"local_sgd_period": 4}


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (Layout(engine="fsdp2", shard=2, ddp=DdpOptions(**POWER)), "ddp.compression is set.*ddp"),
        (Layout(dp=2, fsdp=FsdpOptions(gather="once")), "fsdp.gather is set.*engine to fsdp2"),
        (Layout(dp=2, zero=ZeroOptions(stage=3)), "zero.stage is set, and engine ddp does not"),
        (ddp(1, **LOCAL), "one rank has no other to average with"),
        (ddp(1, compression="bf16"), "ddp.compression is bf16, and one rank sends nothing"),
        (ddp(**LOCAL, **POWER), "both are DDP's one hook"),
        (ddp(**LOCAL, reduce="bf16"), "set mixed_precision.reduce to fp32"),
        (ddp(compression="bf16", reduce="fp16"), "set mixed_precision.reduce to fp32"),
        (ddp(**LOCAL, grad_sync="every"), "grad_sync every sends gradients 2 times a step"),
        (ddp(**POWER, grad_sync="every"), "grad_sync every sends gradients 2 times a step"),
        (ddp(**POWER, precision="fp16"), "fp16's loss scale may differ"),
        (ddp(static_graph=True), "the first of 2 micro-batches keeps them"),
        (ddp(static_graph=True, find_unused_parameters=True), "finds unused parameters by itself"),
        (
            Layout(engine="fsdp2", shard=2, fsdp=FsdpOptions(wrap=("TextLayers",))),
            r"'TextLayers'.*\(nearest first\) TextLayer, Vision",
        ),
        (mixed("zero", towers={"vision": "fp32"}), "DeepSpeed computes the whole model in one"),
        (mixed("zero", keep_fp32=["norms"]), "DeepSpeed casts every weight"),
        (mixed(fp8=["language"]), "a CPU does not compute in fp8"),
    ],
)
def test_what_cannot_work_is_refused(layout, message):
    import re

    found = reason(layout)
    assert found is not None
    assert re.search(message, found), found


@pytest.mark.parametrize(
    "layout",
    [
        Layout(),
        ddp(compression="bf16"),
        ddp(compression="bf16", reduce="bf16"),
        ddp(reduce="bf16", grad_sync="every"),
        ddp(**POWER),
        ddp(**LOCAL),
        ddp(**LOCAL, precision="fp16"),
        ddp(static_graph=True, grad_sync="every"),
        ddp(1, static_graph=True),
        Layout(engine="fsdp2", shard=2, fsdp=FsdpOptions(wrap=("TextLayer",), offload=True)),
        mixed(towers={"head": "fp32"}, keep_fp32=["norms", "attention"]),
        mixed("ddp", towers={"head": "fp32"}),
        mixed("zero", towers={"vision": "bf16"}, keep_fp32=["attention"]),
    ],
)
def test_what_works_is_not(layout):
    assert reason(layout) is None


def test_limits_of_one_micro_batch_do_not_hold_for_it():
    for layout in (ddp(static_graph=True), ddp(**POWER, grad_sync="every")):
        assert reason(layout) is not None
        assert reason(layout, num_micro_batches=1) is None


def test_a_tied_head_has_the_language_models_dtype_under_fsdp2():
    layout = mixed(towers={"head": "fp32"})
    found = reason(layout, shape=TIED)
    assert found is not None
    assert "tie_word_embeddings" in found
    assert reason(mixed("ddp", towers={"head": "fp32"}), shape=TIED) is None
    both = mixed(towers={"head": "fp32", "language": "fp32"})
    assert reason(both, shape=TIED) is None


def test_a_gpu_without_a_dtype_is_named():
    layout = mixed(device="cuda")
    found = reason(layout, cluster=V100)
    assert found is not None
    assert found.startswith("Tesla V100 has no bf16; set plan.layout.precision")
    assert reason(layout, cluster=A100) is None
    assert reason(mixed(device="cuda", precision="fp16"), cluster=V100) is None
    eight = mixed(device="cuda", fp8=["language"])
    found = reason(eight, cluster=A100)
    assert found is not None
    assert "NVIDIA A100 does not compute in fp8" in found
    assert reason(eight, cluster=H100) is None
