from __future__ import annotations

import re
from pathlib import Path

import pytest

from diptych.core.records import DeviceSample, NodeSample, Over
from diptych.monitor.metrics import step_metrics
from tests.launch.test_progress import record

PAGE = Path(__file__).parents[2] / "docs" / "observing.md"

FULL = record(
    12,
    epoch=1,
    loss=2.0,
    vision_loss=3.0,
    lr=1e-3,
    lr_by_tower={"vision": 1e-5, "connector": 1e-4, "language": 2e-3},
    grad_norm=0.5,
    grad_norm_by_tower={"vision": 0.1, "connector": 0.2, "language": 0.4, "head": 0.3},
    num_samples=8,
    num_text_tokens=300,
    num_image_tokens=100,
    padding_fraction=0.25,
    step_s=2.0,
    data_s=0.125,
    tokens_per_s=200.0,
    idle_fraction=0.2,
    loss_by_source={"ocr": 1.5},
    heldout_loss=2.5,
    heldout_loss_by_source={"ocr": 2.25},
    loss_scale=1024.0,
    num_recompiles=2,
    phases_s={"forward": Over(0.5, 0.6, 0.9, 3)},
    model_flops=4e12,
    mfu=0.4,
    hfu=0.5,
    memory_bytes={"peak": Over(1e9, 2e9, 3e9, 1), "allocated": Over(1e9, 1e9, 1.5e9, 0)},
    num_alloc_retries=0,
)

SAMPLES = [
    NodeSample(
        time_s=1.0,
        node=f"n{number}",
        attempt=0,
        devices=(
            DeviceSample(
                index=0,
                busy_fraction=0.5 + number / 4,
                memory_used_bytes=(10 + number) * 10**9,
                power_w=400.0 + 100 * number,
                clock_hz=1.5e9,
                max_clock_hz=2e9,
                temperature_c=60.0 + number,
                throttle_reasons=("sw_power_cap",) if number else (),
                num_ecc_errors=number,
                nvlink_bytes_per_s=2e9,
                pcie_bytes_per_s=1e9,
            ),
        ),
        cpu_fraction=0.5,
        ranks_cpu_cores=2.0,
        loaders_cpu_cores=4.0,
        memory_available_bytes=(100 - number) * 10**9,
        ranks_memory_bytes=(30 + number) * 10**9,
        disk_free_bytes=5 * 10**11,
        disk_read_bytes_per_s=1e9,
        disk_write_bytes_per_s=2e9,
        network_sent_bytes_per_s=3e9,
        network_received_bytes_per_s=4e9,
    )
    for number in range(2)
]


def test_a_full_step_has_every_name():
    metrics = step_metrics(FULL, samples=SAMPLES, contrast_weight=0.1, is_packed=True)
    expected = {
        "loss/total": 2.3,
        "loss/language": 2.0,
        "loss/vision": 3.0,
        "loss/source/ocr": 1.5,
        "loss/heldout": 2.5,
        "loss/heldout/ocr": 2.25,
        "lr/default": 1e-3,
        "lr/llm": 2e-3,
        "lr/vision": 1e-5,
        "lr/connector": 1e-4,
        "gradients/norm": 0.5,
        "gradients/vision_encoder_norm": 0.1,
        "gradients/connector_norm": 0.2,
        "gradients/llm_norm": 0.4,
        "gradients/head_norm": 0.3,
        "gradients/loss_scale": 1024.0,
        "performance/tokens_per_second": 200.0,
        "performance/text_tokens_per_second": 150.0,
        "performance/image_tokens_per_second": 50.0,
        "performance/samples_per_second": 4.0,
        "performance/padding": 0.25,
        "performance/pack_fill": 0.75,
        # A fifth of the ranks' time is idle: the slowest has 1.25 times the mean.
        "performance/rank_imbalance": 0.25,
        "performance/step_seconds": 2.0,
        "performance/data_seconds": 0.125,
        "performance/mfu": 0.4,
        "performance/hfu": 0.5,
        "performance/model_tflops_per_second": 2.0,
        "performance/num_recompiles": 2.0,
        "performance/gpu_util": 0.625,
        "performance/memory_used_gb": 11.0,
        "phases/forward_seconds": 0.6,
        "phases/forward_seconds_max": 0.9,
        "memory/peak_gb": 3.0,
        "memory/allocated_gb": 1.5,
        "memory/num_alloc_retries": 0.0,
        "progress/epoch": 1.0,
        "progress/attempt": 0.0,
        "progress/num_skipped": 0.0,
        "progress/num_masked": 0.0,
        "progress/num_failed_saves": 0.0,
        "devices/power_w": 450.0,
        "devices/temperature_c": 61.0,
        "devices/clock_fraction": 0.75,
        "devices/num_throttled": 1.0,
        "devices/num_ecc_errors": 1.0,
        "devices/nvlink_gb_per_s": 2.0,
        "devices/pcie_gb_per_s": 1.0,
        "host/cpu_fraction": 0.5,
        "host/ranks_cpu_cores": 2.0,
        "host/loaders_cpu_cores": 4.0,
        "host/memory_available_gb": 99.0,
        "host/ranks_memory_gb": 31.0,
        "host/disk_free_gb": 500.0,
        "host/disk_read_gb_per_s": 2.0,
        "host/disk_write_gb_per_s": 4.0,
        "host/network_sent_gb_per_s": 6.0,
        "host/network_received_gb_per_s": 8.0,
    }
    assert metrics == pytest.approx(expected)


def test_what_was_not_measured_is_absent():
    metrics = step_metrics(
        record(1, loss=None, grad_norm=None), samples=[NodeSample(time_s=1, node="a", attempt=0)]
    )
    assert not {name for name in metrics if name.startswith(("loss/", "gradients/", "devices/"))}
    assert not {name for name in metrics if name.startswith(("host/", "phases/", "memory/"))}
    absent = {"performance/mfu", "performance/gpu_util", "performance/pack_fill"}
    absent |= {"performance/rank_imbalance", "performance/memory_used_gb"}
    assert not absent & metrics.keys()
    assert metrics["lr/llm"] == metrics["lr/default"] == 1e-3


def test_the_total_without_a_contrastive_loss_is_the_language_loss():
    assert step_metrics(record(1, loss=1.5))["loss/total"] == 1.5


def test_the_page_has_the_names_that_there_are():
    section = PAGE.read_text("utf-8").partition("## Metrics")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ((?:`[^`]+`(?:, )?)+) \|", section, flags=re.MULTILINE)
    documented = {name for row in rows for name in re.findall(r"`([^`]+/[^`]+)`", row)}
    metrics = step_metrics(FULL, samples=SAMPLES, contrast_weight=0.1, is_packed=True)
    generic = {
        re.sub(r"ocr$", "<source>", name)
        .replace("phases/forward_", "phases/<phase>_")
        .replace("memory/peak_", "memory/<kind>_")
        .replace("memory/allocated_", "memory/<kind>_")
        for name in metrics
    }
    assert documented == generic
