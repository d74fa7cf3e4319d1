"""A layout's ZeRO settings arrive in DeepSpeed: its own reader says what it understood."""

from __future__ import annotations

import os
import warnings

import pytest

from diptych.core.records import (
    Layout,
    MixedPrecision,
    OptimizerOffload,
    ParameterOffload,
    ZeroOptions,
)
from diptych.parallel.zero_config import deepspeed_config


def _read(layout, **arguments):
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from deepspeed.runtime.config import DeepSpeedConfig

        return DeepSpeedConfig(deepspeed_config(layout, **arguments))


def _zero(**options):
    return Layout(engine="zero", zero=ZeroOptions(**options))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_defaults_are_deepspeeds_own_but_for_overlap(stage):
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    found = _read(_zero(stage=stage)).zero_config.model_dump()
    expected = DeepSpeedZeroConfig(stage=stage, overlap_comm=False).model_dump()
    # Ours replaces linear layers of the model alone.
    assert found.pop("memory_efficient_linear") == (stage != 3)
    expected.pop("memory_efficient_linear")
    assert found == expected


def test_every_setting_arrives():
    layout = _zero(
        stage=3,
        reduce_bucket_elements=11,
        allgather_bucket_elements=12,
        prefetch_elements=13,
        persistence_threshold_elements=14,
        max_live_elements=15,
        max_reuse_distance_elements=16,
        overlap=True,
        contiguous_gradients=False,
        optimizer=OptimizerOffload(
            to="nvme", path="/a", pin_memory=True, buffer_count=7, fast_init=True
        ),
        parameters=ParameterOffload(
            to="nvme", path="/b", pin_memory=True, buffer_count=8, buffer_size=17, max_in_cpu=18
        ),
    )
    zero = _read(layout).zero_config
    assert (zero.stage, zero.reduce_bucket_size, zero.allgather_bucket_size) == (3, 11, 12)
    assert (zero.prefetch_bucket_size, zero.param_persistence_threshold) == (13, 14)
    assert (zero.max_live_parameters, zero.max_reuse_distance) == (15, 16)
    assert (zero.overlap_comm, zero.contiguous_gradients) == (True, False)
    optimizer, parameters = zero.offload_optimizer, zero.offload_param
    assert (optimizer.device, str(optimizer.nvme_path), optimizer.pin_memory) == (
        "nvme",
        "/a",
        True,
    )
    assert (optimizer.buffer_count, optimizer.fast_init) == (7, True)
    assert (parameters.device, str(parameters.nvme_path)) == ("nvme", "/b")
    assert (parameters.buffer_count, parameters.buffer_size) == (8, 17)
    assert (parameters.pin_memory, parameters.max_in_cpu) == (True, 18)


def test_a_bucket_is_no_larger_than_the_model():
    assert _read(_zero(), num_elements=1000).zero_config.reduce_bucket_size == 1000
    small = _zero(reduce_bucket_elements=10)
    assert _read(small, num_elements=1000).zero_config.reduce_bucket_size == 10


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_weights_have_the_layouts_dtype_and_gradients_add_up_in_fp32(precision):
    layout = Layout(
        engine="zero", precision=precision, mixed_precision=MixedPrecision(reduce="bf16")
    )
    found = _read(layout)
    assert found.bfloat16_config.enabled == (precision == "bf16")
    assert found.float16_config.enabled == (precision == "fp16")
    assert str(found.communication_data_type) == "torch.bfloat16"
    assert found.grad_accum_dtype == (None if precision == "fp32" else "fp32")


def test_nothing_divides_the_gradient_or_moves_the_rate():
    found = _read(_zero())
    assert found.gradient_accumulation_steps == 1
    assert found.gradient_clipping == 0.0
    assert found.scheduler_name is None
    assert not found.prescale_gradients
    assert found.gradient_predivide_factor == 1.0
