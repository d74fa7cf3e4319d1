"""What a person knows from FSDP1, accelerate or a textbook means the same here, or is refused."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from diptych.core.records import FsdpOptions


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"sharding_strategy": "FULL_SHARD"}, {"gather": "twice"}),
        ({"sharding_strategy": "SHARD_GRAD_OP"}, {"gather": "once"}),
        ({"sharding_strategy": "ShardingStrategy.SHARD_GRAD_OP"}, {"gather": "once"}),
        ({"fsdp_sharding_strategy": 2}, {"gather": "once"}),
        ({"fsdp_reshard_after_forward": False}, {"gather": "once"}),
        ({"reshard_after_forward": "true"}, {"gather": "twice"}),
        ({"fsdp_reshard_after_forward": "SHARD_GRAD_OP"}, None),
        ({"backward_prefetch": "BACKWARD_PRE"}, {"prefetch_backward": 1}),
        ({"fsdp_backward_prefetch": "NO_PREFETCH"}, {"prefetch_backward": 0}),
        ({"backward_prefetch": None}, {"prefetch_backward": 0}),
        ({"forward_prefetch": True}, {"prefetch_forward": 1}),
        ({"forward_prefetch": False}, {"prefetch_forward": 0}),
        ({"cpu_offload": True}, {"offload": True}),
        ({"cpu_offload": {"offload_params": True}}, {"offload": True}),
        ({"fsdp_offload_params": False}, {"offload": False}),
        (
            {
                "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
                "fsdp_transformer_layer_cls_to_wrap": "Qwen3VLVisionBlock, Qwen3VLTextDecoderLayer",
            },
            {"wrap": ("Qwen3VLVisionBlock", "Qwen3VLTextDecoderLayer")},
        ),
        ({"transformer_layer_cls_to_wrap": ["Block"]}, {"wrap": ("Block",)}),
        (
            {
                "use_orig_params": True,
                "limit_all_gathers": True,
                "sync_module_states": True,
                "cpu_ram_efficient_loading": False,
                "state_dict_type": "SHARDED_STATE_DICT",
                "activation_checkpointing": False,
                "version": 2,
            },
            {},
        ),
        # One setting said twice, in both tongues.
        ({"sharding_strategy": "SHARD_GRAD_OP", "gather": "once"}, {"gather": "once"}),
    ],
)
def test_a_former_name_is_understood(given, expected):
    if expected is None:
        with pytest.raises(ValidationError, match="known are TRUE, FALSE"):
            FsdpOptions.model_validate(given)
    else:
        assert FsdpOptions.model_validate(given) == FsdpOptions(**expected)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"sharding_strategy": "HYBRID_SHARD"}, "plan.layout.replicas.*gather to twice"),
        ({"sharding_strategy": "_HYBRID_SHARD_ZERO2"}, "plan.layout.replicas.*gather to once"),
        ({"fsdp_sharding_strategy": 3}, "plan.layout.engine: ddp"),
        ({"sharding_strategy": "ZERO3"}, "sharding_strategy is ZERO3; known are FULL_SHARD"),
        ({"backward_prefetch": "BACKWARD_POST"}, "set prefetch_backward to 1"),
        ({"use_orig_params": False}, "parameters keep their names"),
        ({"auto_wrap_policy": "SIZE_BASED_WRAP"}, "wrap names layer classes"),
        ({"fsdp_min_num_params": 10000}, "wrap names layer classes"),
        ({"auto_wrap_policy": "NO_WRAP"}, "use engine ddp"),
        ({"limit_all_gathers": False}, "FSDP2 has no such choice"),
        ({"cpu_ram_efficient_loading": True}, "every rank reads its own rows"),
        ({"state_dict_type": "FULL_STATE_DICT"}, "any layout reads them"),
        ({"activation_checkpointing": True}, "plan.layout.memory.recompute: blocks"),
        ({"mixed_precision": "bf16"}, "plan.layout.precision"),
        ({"version": 1}, "only FSDP2 is built"),
        ({"sharding_strategy": "FULL_SHARD", "gather": "once"}, "keep gather alone"),
        ({"sharding": "FULL_SHARD"}, "Extra inputs are not permitted"),
    ],
)
def test_what_works_otherwise_is_refused_with_what_replaced_it(given, message):
    with pytest.raises(ValidationError, match=message):
        FsdpOptions.model_validate(given)


def test_what_was_read_is_written_under_our_names():
    options = FsdpOptions.model_validate({"sharding_strategy": "SHARD_GRAD_OP"})
    assert "sharding_strategy" not in options.model_dump()
    assert FsdpOptions.model_validate_json(options.model_dump_json()) == options
