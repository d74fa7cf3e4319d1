"""DeepSpeed's configurations as settings: its documentation's own examples, and wrong ones."""

from __future__ import annotations

import pytest

from diptych.core.errors import ConfigError
from diptych.plan.deepspeed_config import read_deepspeed
from diptych.plan.search import LayoutParams

# From DeepSpeed's documentation of its configuration file, ZeRO-3 with offload.
DOCUMENTED = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "Adam", "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8}},
    "gradient_clipping": 1.0,
    "fp16": {
        "enabled": True,
        "loss_scale": 0,
        "initial_scale_power": 16,
        "loss_scale_window": 1000,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "zero_optimization": {
        "stage": 3,
        "contiguous_gradients": True,
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_prefetch_bucket_size": 1e7,
        "stage3_param_persistence_threshold": 1e5,
        "reduce_bucket_size": 1e7,
        "sub_group_size": 1e9,
        "offload_optimizer": {"device": "cpu"},
        "offload_param": {
            "device": "nvme",
            "nvme_path": "/local_nvme",
            "pin_memory": True,
            "buffer_count": 6,
            "buffer_size": 1e8,
            "max_in_cpu": 1e9,
        },
    },
    "wall_clock_breakdown": False,
}


def test_the_documented_example_becomes_settings_that_the_planner_takes():
    found = read_deepspeed(DOCUMENTED)
    parameters = found.parameters()
    layout = LayoutParams.model_validate(parameters["plan"]["layout"])
    assert (layout.engine, layout.precision, layout.num_processes) == ("zero", "fp16", 8)
    assert (layout.micro_batch, layout.zero.stage) == (4, 3)
    assert layout.zero.optimizer.to == "cpu"
    parameters_offload = layout.zero.parameters
    assert (parameters_offload.to, parameters_offload.path) == ("nvme", "/local_nvme")
    assert (parameters_offload.buffer_count, parameters_offload.pin_memory) == (6, True)
    scale = layout.mixed_precision.loss_scale
    assert (scale.initial, scale.growth_interval, scale.minimum) == (65536, 1000, 1)
    assert parameters["train"]["schedule"] == {"global_batch": 64}
    assert parameters["train"]["optimizer"]["betas"] == [0.8, 0.999]
    left = {each.theirs for each in found.left}
    assert {"wall_clock_breakdown", "fp16.hysteresis", "zero_optimization.sub_group_size"} <= left


def test_every_key_is_taken_over_or_left_out_with_a_reason():
    found = read_deepspeed(DOCUMENTED)
    told = {each.theirs for each in (*found.taken, *found.left)}

    def leaves(part, path=""):
        for name, value in part.items():
            if isinstance(value, dict):
                yield from leaves(value, f"{path}{name}.")
            else:
                yield f"{path}{name}"

    told |= {part for each in told for part in each.split(" / ")}
    assert set(leaves(DOCUMENTED)) <= told
    assert all(each.why for each in found.left)


def test_what_would_change_is_listed_with_the_value_now():
    present = {"train": {"optimizer": {"lr": 0.5, "max_grad_norm": 1.0}}}
    changes = {
        each.ours: now
        for each, now in read_deepspeed(
            {"gradient_clipping": 1.0, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}
        ).overrides(present)
    }
    assert changes == {"plan.layout.engine": None, "train.optimizer.lr": 0.5}


def test_auto_leaves_it_to_the_planner():
    found = read_deepspeed({"train_batch_size": "auto", "bf16": {"enabled": "auto"}})
    assert [each.ours for each in found.taken] == ["plan.layout.engine"]
    assert {each.theirs for each in found.left} == {"train_batch_size", "bf16.enabled"}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ([], "JSON object"),
        ({"zero_optimisation": {}}, "Did you mean 'zero_optimization'"),
        ({"zero_optimization": {"stage": 0}}, "engine ddp"),
        ({"zero_optimization": {"stagee": 2}}, "Did you mean 'stage'"),
        ({"zero_optimization": {"offload_param": {"device": "disk"}}}, "none, cpu, nvme"),
        ({"zero_optimization": 3}, "An object of settings"),
        ({"optimizer": {"type": "Lion"}}, "Adam and AdamW"),
        ({"gradient_clipping": "yes"}, "A number"),
        (
            {
                "train_batch_size": 30,
                "train_micro_batch_size_per_gpu": 4,
                "gradient_accumulation_steps": 2,
            },
            "4 times gradient_accumulation_steps 2 is 8",
        ),
    ],
)
def test_a_wrong_configuration_is_refused(config, words):
    with pytest.raises(ConfigError, match=words):
        read_deepspeed(config)
