"""DeepSpeed's configuration: a layout in, the dictionary for `deepspeed.initialize` out.

There is no second config file: what can be set is in the layout. Batch sizes are placeholders, for
the schedule forms the batches; the learning rate, clipping and the loss scale are set at run time.
"""

from __future__ import annotations

from typing import Any

from diptych.core.records import Layout, OptimizerOffload, ParameterOffload, ZeroOptions


def deepspeed_config(layout: Layout, *, num_elements: int | None = None) -> dict[str, Any]:
    """Translate a layout.

    Args:
        layout: Its engine is `zero`.
        num_elements: How many the model has; larger buckets are cut to that, for DeepSpeed
            allocates a bucket whole.
    """
    options = layout.zero
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "steps_per_print": None,
        "wall_clock_breakdown": False,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "communication_data_type": layout.mixed_precision.reduce,
        "zero_optimization": _zero(options, num_elements=num_elements),
        **_precision(layout),
    }


def _zero(options: ZeroOptions, *, num_elements: int | None) -> dict[str, Any]:
    zero: dict[str, Any] = {
        "stage": options.stage,
        "reduce_scatter": True,
        "reduce_bucket_size": _cut(options.reduce_bucket_elements, most=num_elements),
        "allgather_bucket_size": options.allgather_bucket_elements,
        "overlap_comm": options.overlap,
        "contiguous_gradients": options.contiguous_gradients,
        "offload_optimizer": _offload_optimizer(options.optimizer),
    }
    if options.stage == 3:
        zero |= {
            "stage3_prefetch_bucket_size": options.prefetch_elements,
            "stage3_param_persistence_threshold": options.persistence_threshold_elements,
            "stage3_max_live_parameters": options.max_live_elements,
            "stage3_max_reuse_distance": options.max_reuse_distance_elements,
            # It would replace `torch.nn.functional.linear` of the whole process.
            "memory_efficient_linear": False,
            "offload_param": _offload_parameters(options.parameters),
        }
    return zero


def _offload_optimizer(offload: OptimizerOffload) -> dict[str, Any] | None:
    if offload.to == "device":
        return None
    found: dict[str, Any] = {"device": offload.to, "pin_memory": offload.pin_memory}
    if offload.to == "nvme":
        found |= {
            "nvme_path": offload.path,
            "buffer_count": offload.buffer_count,
            "fast_init": offload.fast_init,
        }
    return found


def _offload_parameters(offload: ParameterOffload) -> dict[str, Any] | None:
    if offload.to == "device":
        return None
    found: dict[str, Any] = {"device": offload.to, "pin_memory": offload.pin_memory}
    if offload.to == "nvme":
        found |= {
            "nvme_path": offload.path,
            "buffer_count": offload.buffer_count,
            "buffer_size": offload.buffer_size,
            "max_in_cpu": offload.max_in_cpu,
        }
    return found


def _precision(layout: Layout) -> dict[str, Any]:
    """Choose the weights' dtype; gradients of several micro-batches add up in fp32."""
    if layout.precision == "fp32":
        return {}
    accumulate = {"data_types": {"grad_accum_dtype": "fp32"}}
    if layout.precision == "bf16":
        # Stage 1 adds each gradient up as it is made, instead of keeping a copy in bf16.
        bf16 = {"enabled": True, "check_grad_overflow": True, "immediate_grad_update": True}
        return {"bf16": bf16, **accumulate}
    # A fixed scale of one, which the engine overrides with its own before every step.
    fp16 = {"enabled": True, "auto_cast": False, "loss_scale": 1.0}
    return {"fp16": fp16, **accumulate}


def _cut(num_elements: int, *, most: int | None) -> int:
    return num_elements if most is None else min(num_elements, max(1, most))
