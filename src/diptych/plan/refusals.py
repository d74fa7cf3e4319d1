"""Why a layout cannot run: a layout and what is known of model, machine and data in, a reason out.

Every reason says what was found, what is allowed and what to do. Nothing is started to find out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from diptych.core.records import Cluster, Layout, ModelShape
from diptych.plan import modules, native, states, zero_limits
from diptych.plan.gpus import capability_of
from diptych.plan.states import States
from diptych.shape.adapters import is_adapter
from diptych.shape.attention import objection, situation_of

_ADAMW = States()
NOT_BUILT = {"tp": "tensor", "pp": "pipeline", "cp": "context"}


@dataclass(frozen=True)
class Setting:
    """Where a layout is to run.

    Attributes:
        model_shape: the model.
        cluster: the machine.
        num_micro_batches: of one step.
        group: rows that stay together in a micro-batch.
        global_batch: rows of one step.
        states: what is kept beside the weights.
    """

    model_shape: ModelShape
    cluster: Cluster
    num_micro_batches: int
    group: int
    global_batch: int
    states: States = _ADAMW


def refusal(layout: Layout, *, setting: Setting) -> str | None:
    """Return the first reason why a layout cannot run, None if there is none."""
    return next((reason for check in _CHECKS if (reason := check(layout, setting))), None)


def unbuilt_axis(layout: Layout) -> str | None:
    """Name an axis that is larger than one and not built yet."""
    return next((axis for axis in NOT_BUILT if getattr(layout, axis) > 1), None)


def _axes(layout: Layout, setting: Setting) -> str | None:
    if axis := unbuilt_axis(layout):
        return f"{NOT_BUILT[axis]} parallelism ({axis}) is not built yet"
    return None


def _groups(layout: Layout, setting: Setting) -> str | None:
    group = setting.group
    if layout.micro_batch % group and group % layout.micro_batch:
        return (
            f"a micro-batch of {layout.micro_batch} rows splits groups of {group}; "
            "it must divide train.schedule.group or be a multiple of it"
        )
    return None


def _work(layout: Layout, setting: Setting) -> str | None:
    if layout.micro_batch > setting.global_batch:
        return (
            f"a micro-batch of {layout.micro_batch} rows is larger than the global batch of "
            f"{setting.global_batch}; lower plan.layout.micro_batch, or raise "
            "train.schedule.global_batch"
        )
    if layout.dp * layout.shard > setting.global_batch:
        return (
            f"{layout.world_size} ranks share a global batch of {setting.global_batch} "
            "rows, so some would never work"
        )
    return None


def _modules(layout: Layout, setting: Setting) -> str | None:
    return modules.refusal(
        layout, model_shape=setting.model_shape, num_micro_batches=setting.num_micro_batches
    )


def _native(layout: Layout, setting: Setting) -> str | None:
    return native.refusal(
        layout,
        model_shape=setting.model_shape,
        cluster=setting.cluster,
        num_micro_batches=setting.num_micro_batches,
    )


def _zero(layout: Layout, setting: Setting) -> str | None:
    return zero_limits.refusal(layout, model_shape=setting.model_shape)


def _states(layout: Layout, setting: Setting) -> str | None:
    return states.refusal(layout, states=setting.states)


def _loss(layout: Layout, setting: Setting) -> str | None:
    if layout.memory.loss == "fused" and layout.device != "cuda":
        return (
            "memory.loss is fused, which is Liger's kernel for GPUs, and this layout is on a CPU; "
            "set plan.layout.memory.loss to chunked"
        )
    return None


def _attention(layout: Layout, setting: Setting) -> str | None:
    """Refuse a kernel of attention that is asked for by name, and is known not to run."""
    kernel = layout.attention
    if kernel == "auto":
        return None
    found = objection(
        kernel,
        situation_of(
            layout,
            model_family=setting.model_shape.family,
            sizes=setting.model_shape.sizes,
            is_packed=False,
            capability=capability_of(setting.cluster.device.name),
            missing=None,
        ),
    )
    if found is None:
        return None
    return f"attention is {kernel}, and {found.reason}; {found.cure}, or set it to auto"


def _adapters(layout: Layout, setting: Setting) -> str | None:
    adapted = {each.tower for each in setting.model_shape.parameters if is_adapter(each.name)}
    both = sorted(adapted & set(layout.mixed_precision.fp8))
    if both:
        return (
            f"mixed_precision.fp8 and plan.model.lora both name {', '.join(both)}, and adapters in "
            "fp8 are not built; take it out of one of them"
        )
    return None


_CHECKS: tuple[Callable[[Layout, Setting], str | None], ...] = (
    _axes,
    _groups,
    _work,
    _modules,
    _native,
    _zero,
    _states,
    _loss,
    _attention,
    _adapters,
)
