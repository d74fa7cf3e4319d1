"""`layout`: how a run is spread, in which precision, and what it trades memory for.

The sections are also part of the parameters (`plan.layout`): one class, one set of defaults.
"""

from __future__ import annotations

import re
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from diptych.core.errors import nearest
from diptych.core.records.base import Record, Section
from diptych.core.records.former import translate_fsdp

EngineName = Literal["ddp", "fsdp2", "zero"]
Dtype = Literal["fp32", "bf16", "fp16"]
TowerName = Literal["vision", "connector", "language", "head"]
Kernel = Literal["sdpa", "flex", "flash_2", "flash_3", "flash_4"]
"""What computes a decoder's attention: torch's two, and Flash Attention's three packages."""

ALLOCATOR_KEYS = (
    "backend",
    "expandable_segments",
    "garbage_collection_threshold",
    "graph_capture_record_stream_reuse",
    "large_segment_size_mb",
    "max_non_split_rounding_mb",
    "max_split_size_mb",
    "per_process_memory_fraction",
    "pinned_free_catch_all",
    "pinned_max_cached_size_mb",
    "pinned_max_round_threshold_mb",
    "pinned_num_register_threads",
    "pinned_reserve_segment_size_mb",
    "pinned_use_background_threads",
    "pinned_use_cuda_host_register",
    "release_lock_on_cudamalloc",
    "roundup_power2_divisions",
    "throw_on_cudamalloc_oom",
)
"""What torch's allocator of CUDA devices and of pinned memory takes.

Source: torch 2.14, `c10/core/AllocatorConfig.h` and `c10/cuda/CUDAAllocatorConfig.h`.
"""


class DdpOptions(Section):
    """`ddp`: replicated weights, gradients averaged in buckets.

    `compression` sends gradients in fewer bits: `bf16` and `fp16` halve them, `powersgd` sends
    factors of rank `powersgd_rank` once `powersgd_start_step` steps were sent whole.
    `local_sgd_period`: from step `local_sgd_start_step` on every rank trains on its own, and
    weights are averaged once in so many steps; None averages gradients in every step.
    """

    bucket_bytes: int = Field(default=25 * 1024**2, ge=1024)
    gradient_as_bucket_view: bool = True
    static_graph: bool = False
    find_unused_parameters: bool = False
    broadcast_buffers: bool = False
    compression: Literal["none", "bf16", "fp16", "powersgd"] = "none"
    powersgd_rank: int = Field(default=1, ge=1)
    powersgd_start_step: int = Field(default=1000, ge=2)
    local_sgd_period: int | None = Field(default=None, ge=2)
    local_sgd_start_step: int = Field(default=100, ge=0)


class FsdpOptions(Section):
    """`fsdp2`: weights, gradients and optimizer state sharded unit by unit.

    `gather`: `twice` frees a unit's whole weights after its forward and gathers them again for its
    backward (ZeRO 3); `once` keeps them between (ZeRO 2's memory for weights). `wrap` names layer
    classes to shard on their own instead of the family's units. `prefetch_*`: how many further
    units are gathered ahead of the running one. `offload` keeps shards in the host's memory and
    updates them there.

    Names of FSDP1 and accelerate are understood (`core/records/former.py`): sharding_strategy and
    reshard_after_forward become `gather`, backward_prefetch and forward_prefetch `prefetch_*`,
    transformer_layer_cls_to_wrap `wrap`, cpu_offload `offload`; the others are refused with what
    replaced them, or left out where FSDP2 always does what they ask for.
    """

    gather: Literal["twice", "once"] = "twice"
    wrap: tuple[str, ...] = ()
    prefetch_forward: int = Field(default=0, ge=0)
    prefetch_backward: int = Field(default=1, ge=0)
    offload: bool = False
    pin_memory: bool = True

    @model_validator(mode="before")
    @classmethod
    def _translate(cls, given: Any) -> Any:
        return translate_fsdp(given)


class OptimizerOffload(Section):
    """Where ZeRO keeps the optimizer's state; `path` is a folder on an NVMe disk.

    `adam`: DeepSpeed's own CPU kernel, compiled on first use, or torch's.
    """

    to: Literal["device", "cpu", "nvme"] = "device"
    path: str | None = None
    pin_memory: bool = False
    buffer_count: int = Field(default=4, ge=1)
    fast_init: bool = False
    adam: Literal["deepspeed", "torch"] = "deepspeed"


class ParameterOffload(Section):
    """Where ZeRO 3 keeps weights; sizes count elements, as DeepSpeed does."""

    to: Literal["device", "cpu", "nvme"] = "device"
    path: str | None = None
    pin_memory: bool = False
    buffer_count: int = Field(default=5, ge=1)
    buffer_size: int = Field(default=100_000_000, ge=1)
    max_in_cpu: int = Field(default=1_000_000_000, ge=0)


class ZeroOptions(Section):
    """`zero`: DeepSpeed's ZeRO. Sizes count elements, as DeepSpeed does.

    `stage` 1 shards the optimizer's state, 2 gradients too, 3 weights too.
    """

    stage: Literal[1, 2, 3] = 2
    reduce_bucket_elements: int = Field(default=500_000_000, ge=1)
    allgather_bucket_elements: int = Field(default=500_000_000, ge=1)
    prefetch_elements: int = Field(default=50_000_000, ge=0)
    persistence_threshold_elements: int = Field(default=100_000, ge=0)
    max_live_elements: int = Field(default=1_000_000_000, ge=1)
    max_reuse_distance_elements: int = Field(default=1_000_000_000, ge=0)
    overlap: bool = False
    contiguous_gradients: bool = True
    optimizer: OptimizerOffload = OptimizerOffload()
    parameters: ParameterOffload = ParameterOffload()


class LossScale(Section):
    """fp16's dynamic loss scale: a step that overflows is skipped and the scale shrinks."""

    initial: float = Field(default=65536.0, gt=0)
    minimum: float = Field(default=1.0, gt=0)
    growth_interval: int = Field(default=2000, ge=1)
    growth: float = Field(default=2.0, gt=1)
    backoff: float = Field(default=0.5, gt=0, lt=1)

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.minimum > self.initial:
            raise ValueError(
                f"loss_scale.minimum is {self.minimum:g} and initial is {self.initial:g}; "
                "the scale cannot start below its minimum: raise initial"
            )
        return self


class MixedPrecision(Section):
    """What departs from the layout's `precision`; weights of the optimizer are fp32 in any case.

    `towers`: another dtype for a tower. `reduce`: the dtype in which gradients travel. `keep_fp32`:
    norms, or attention's products and softmax, computed in fp32. `fp8`: towers whose linear layers
    compute in fp8, where the device has it.
    """

    towers: dict[TowerName, Dtype] = Field(default_factory=dict)
    reduce: Dtype = "fp32"
    keep_fp32: tuple[Literal["norms", "attention"], ...] = ()
    fp8: tuple[Literal["vision", "language"], ...] = ()
    loss_scale: LossScale = LossScale()


class MemoryOptions(Section):
    """What a step computes or copies again instead of holding it.

    `recompute`: `blocks` keeps only the input of every chosen block and computes the rest again in
    the backward pass; `operators` keeps the results of matrix products and attention and computes
    what is cheap again. `vision_every` and `language_every` choose every k-th block, from the first
    on, 0 none; `recompute_connector` the connector. `offload_activations` keeps what autograd saves
    in the host's memory. `loss`: `whole` computes the logits of all label tokens at once, `chunked`
    of `loss_chunk_tokens` at a time, `fused` by Liger's kernel. `release_cache_every_steps` gives
    unused blocks back to the device. `allocator` is handed to torch's (PYTORCH_ALLOC_CONF).
    `token_multiple` and `patch_multiple` pad micro-batches to few shapes, and `reuse_buffers`
    copies each into memory that is allocated once per shape.
    """

    recompute: Literal["none", "blocks", "operators"] = "none"
    vision_every: int = Field(default=1, ge=0)
    language_every: int = Field(default=1, ge=0)
    recompute_connector: bool = True
    offload_activations: bool = False
    loss: Literal["whole", "chunked", "fused"] = "whole"
    loss_chunk_tokens: int = Field(default=1024, ge=1)
    release_cache_every_steps: int = Field(default=0, ge=0)
    allocator: str | None = None
    token_multiple: int = Field(default=1, ge=1)
    patch_multiple: int | None = Field(default=None, ge=4)
    reuse_buffers: bool = False

    @field_validator("allocator")
    @classmethod
    def _check_allocator(cls, settings: str | None) -> str | None:
        """Read `key:value,key:value`; a value may be a list in brackets, with commas of its own."""
        for setting in re.split(r",(?![^\[]*\])", settings) if settings is not None else ():
            key, colon, value = setting.strip().partition(":")
            if not (colon and value) or re.search(r"\s", setting.strip()):
                raise ValueError(
                    f"allocator is {settings!r}; '{setting}' is no key:value as in "
                    "expandable_segments:True,max_split_size_mb:512"
                )
            if key not in ALLOCATOR_KEYS:
                raise ValueError(
                    f"allocator has the key '{key}', which torch does not know. "
                    f"{nearest(key, allowed=ALLOCATOR_KEYS)}"
                )
        return settings


class CompileOptions(Section):
    """`torch.compile`, block by block.

    `shapes`: `dynamic` makes one graph for all lengths, `static` one for each shape, of which there
    are few where `memory.token_multiple` and `patch_multiple` say so. After `max_recompiles` of one
    block it runs uncompiled.
    """

    blocks: tuple[Literal["vision", "language"], ...] = ()
    shapes: Literal["dynamic", "static"] = "dynamic"
    max_recompiles: int = Field(default=8, ge=1)


class Layout(Record):
    """How a run is spread. World size is the product of the axes; only dp and shard are built."""

    engine: EngineName = "ddp"
    dp: int = 1
    shard: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    micro_batch: int = 1
    precision: Dtype = "fp32"
    device: Literal["cpu", "cuda"] = "cpu"
    grad_sync: Literal["last", "every"] = "last"
    batch_norm: Literal["refuse", "frozen", "sync"] = "refuse"
    attention: Literal["auto"] | Kernel = "auto"
    ddp: DdpOptions = DdpOptions()
    fsdp: FsdpOptions = FsdpOptions()
    zero: ZeroOptions = ZeroOptions()
    mixed_precision: MixedPrecision = MixedPrecision()
    memory: MemoryOptions = MemoryOptions()
    compile: CompileOptions = CompileOptions()

    @property
    def world_size(self) -> int:
        """Count the ranks."""
        return self.dp * self.shard * self.tp * self.pp * self.cp

    @property
    def is_fp16(self) -> bool:
        """Whether any part computes in fp16, so that the loss has to be scaled."""
        return "fp16" in (self.precision, *self.mixed_precision.towers.values())

    @property
    def departures(self) -> tuple[str, ...]:
        """Say what changes the mathematics by design, so that losses need not follow one process.

        Lower precision is not among them: it rounds, and promises its own tolerance.
        """
        said = []
        if self.engine == "ddp" and self.dp > 1:
            if self.ddp.compression != "none":
                said.append(f"gradients are sent compressed ({self.ddp.compression})")
            elif self.mixed_precision.reduce != "fp32":
                said.append(f"gradients are sent in {self.mixed_precision.reduce}")
            if self.ddp.local_sgd_period is not None:
                said.append(
                    f"weights are averaged only every {self.ddp.local_sgd_period} steps (local SGD)"
                )
        if self.mixed_precision.fp8:
            said.append(f"linear layers of {', '.join(self.mixed_precision.fp8)} compute in fp8")
        if self.batch_norm == "sync":
            said.append("batch norm sees a micro-batch of all ranks, not the global batch")
        return tuple(said)
