"""A kernel that is asked for by name, and known not to run, is refused by the planner."""

from __future__ import annotations

import pytest

from diptych.core.records import Layout, MixedPrecision
from diptych.plan.gpus import capability_of
from diptych.plan.refusals import Setting, refusal
from tests.plan.conftest import cpu_cluster, gpu_cluster

A100, H100, B200, OTHER = (
    gpu_cluster(name, 80, num_devices=2, flops_per_s={"bf16": 1e15, "fp32": 7e13})
    for name in ("NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3", "NVIDIA B200", "a GPU")
)


def _reason(starter_shape, cluster, **fields):
    layout = Layout(
        dp=2, device=cluster.device.kind, **{"precision": "bf16", "micro_batch": 8, **fields}
    )
    setting = Setting(
        model_shape=starter_shape, cluster=cluster, num_micro_batches=2, group=8, global_batch=32
    )
    return refusal(layout, setting=setting)


@pytest.mark.parametrize(
    ("cluster", "fields", "message"),
    [
        (cpu_cluster(4), {"attention": "flex"}, "is flex, and it has no backward pass on a CPU;"),
        (cpu_cluster(4), {"attention": "flash_2"}, "runs on GPUs alone; train on a GPU, or set it"),
        (H100, {"attention": "flash_3", "precision": "fp32"}, "and the decoder in fp32"),
        (A100, {"attention": "flash_3"}, "capability is 8.0, it takes 9.x alone"),
        (A100, {"attention": "flash_4"}, "capability is 8.0, it takes 9.0 or later"),
        (B200, {"attention": "flash_3"}, "capability is 10.0, it takes 9.x alone"),
        (
            H100,
            {
                "attention": "flash_2",
                "mixed_precision": MixedPrecision(keep_fp32=("attention",)),
            },
            "holds attention in fp32",
        ),
    ],
)
def test_what_cannot_run_is_refused(starter_shape, cluster, fields, message):
    assert message in (_reason(starter_shape, cluster, **fields) or "")


@pytest.mark.parametrize(
    ("cluster", "fields"),
    [
        (cpu_cluster(4), {}),
        (cpu_cluster(4), {"attention": "sdpa"}),
        (A100, {"attention": "flash_2"}),
        (A100, {"attention": "flex"}),
        (H100, {"attention": "flash_3"}),
        (B200, {"attention": "flash_4"}),
        (OTHER, {"attention": "flash_3"}),
    ],
)
def test_what_may_run_is_not(starter_shape, cluster, fields):
    assert _reason(starter_shape, cluster, **fields) is None


def test_no_flash_for_a_family_that_looks_ahead(starter_shape):
    shape = starter_shape.model_copy(update={"family": "gemma3"})
    for kernel in ("flash_2", "flash_3", "flash_4"):
        assert "see each other in this family" in _reason(shape, H100, attention=kernel)
    assert _reason(shape, H100, attention="flex") is None


@pytest.mark.parametrize(
    ("name", "capability"),
    [
        ("NVIDIA H100 80GB HBM3", (9, 0)),
        ("NVIDIA A100-SXM4-40GB", (8, 0)),
        ("NVIDIA L4", (8, 9)),
        ("NVIDIA GeForce RTX 4090", (8, 9)),
        ("Tesla V100-SXM2-16GB", (7, 0)),
        ("Radeon", None),
        ("Intel(R) Xeon(R)", None),
    ],
)
def test_compute_capabilities_by_name(name, capability):
    assert capability_of(name) == capability
