"""What an optimizer keeps of every weight: bytes, and what a layout cannot keep.

In: an optimizer's kind and towers, and whether the weights' mean is kept. Out: groups, bytes of an
element, or a reason why a layout cannot run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from diptych.core.records import Layout, ModelShape, OptimizerKind, OptimizerSpec, Parameter
from diptych.shape.groups import Group, group_parameters

_BLOCK, _LEAST_ELEMENTS = 256, 4096
"""Torchao's: numbers that share a scale, and how many a tensor has at least to be kept in eight
bits."""
_TABLE_BYTES = 1024
_MEAN_BYTES = 4
_WEIGHT_BYTES = 4
"""Weights are saved in fp32."""
_COUNTER_BYTES = 4
"""AdamW counts its steps once for every tensor, in fp32."""
_MOVED_BYTES: dict[OptimizerKind, int] = {"adamw": 28, "adamw_8bit": 16, "muon": 20}
"""Of an element in a fused update: weight and moments read and written, gradient read."""
_MEAN_MOVED_BYTES = 12
"""The mean read and written, the new weight read."""


@dataclass(frozen=True)
class States:
    """What a run keeps beside the weights.

    Attributes:
        optimizer: its kind and its towers' settings count; the rates themselves do not.
        has_mean: whether the weights' mean (EMA) is kept.
    """

    optimizer: OptimizerSpec = field(default_factory=OptimizerSpec)
    has_mean: bool = False

    def groups(self, model_shape: ModelShape) -> tuple[Group, ...]:
        """List the optimizer's groups."""
        return group_parameters(model_shape.parameters, spec=self.optimizer)

    @property
    def mean_bytes(self) -> int:
        """Count the mean's bytes of an element."""
        return _MEAN_BYTES if self.has_mean else 0

    def held_bytes(self, model_shape: ModelShape, *, num_local: Callable[[Parameter], int]) -> int:
        """Count what a rank keeps of all trained weights, of which it has so many elements each."""
        return sum(
            _moments_bytes(group.algorithm, num_elements=num) + self.mean_bytes * num
            for group in self.groups(model_shape)
            for num in map(num_local, group.parameters)
        )

    def checkpoint_bytes(self, model_shape: ModelShape) -> int:
        """Count the tensors of a checkpoint: all weights in fp32, and what is kept of them."""
        kept = self.held_bytes(model_shape, num_local=lambda parameter: parameter.num_elements)
        return _WEIGHT_BYTES * model_shape.num_parameters + kept

    def moved_bytes(self, model_shape: ModelShape) -> int:
        """Count what an update of all trained weights moves."""
        mean = _MEAN_MOVED_BYTES if self.has_mean else 0
        return sum(
            (_MOVED_BYTES[group.algorithm] + mean) * each.num_elements
            for group in self.groups(model_shape)
            for each in group.parameters
        )


def _moments_bytes(kind: OptimizerKind, *, num_elements: int) -> int:
    """Count the moments of a tensor's elements, and AdamW's counter.

    Source: `_AdamBase._new_buffer` and `OptimState8bit` of torchao 0.18.
    """
    if kind == "muon":
        return 4 * num_elements
    is_low = num_elements >= _LEAST_ELEMENTS and num_elements % _BLOCK == 0
    if kind == "adamw_8bit" and is_low:
        return 2 * (num_elements + 4 * (num_elements // _BLOCK) + _TABLE_BYTES) + _COUNTER_BYTES
    return 8 * num_elements + _COUNTER_BYTES


def refusal(layout: Layout, *, states: States) -> str | None:
    """Return the first reason why a layout cannot keep or update these states, None without one."""
    return (
        _shared_out(layout, kind=states.optimizer.kind)
        or _local_sgd(layout, kind=states.optimizer.kind)
        or _on_disk(layout, has_mean=states.has_mean)
    )


def _shared_out(layout: Layout, *, kind: OptimizerKind) -> str | None:
    if kind == "adamw" or layout.engine == "ddp":
        return None
    why = {
        "muon": "whose update of a matrix needs its whole gradient",
        "adamw_8bit": "whose blocks of 256 numbers have to lie together",
    }[kind]
    return (
        f"train.optimizer.kind is {kind}, {why}, and engine {layout.engine} shares weights out; "
        "use engine ddp, or set kind to adamw"
    )


def _local_sgd(layout: Layout, *, kind: OptimizerKind) -> str | None:
    if kind != "adamw_8bit" or layout.ddp.local_sgd_period is None:
        return None
    return (
        "train.optimizer.kind is adamw_8bit, whose moments cannot be averaged over ranks, and "
        "ddp.local_sgd_period does so before every checkpoint; set it to null, or kind to adamw"
    )


def _on_disk(layout: Layout, *, has_mean: bool) -> str | None:
    if not has_mean or layout.engine != "zero" or layout.zero.optimizer.to != "nvme":
        return None
    return (
        "train.ema_decay keeps the weights' mean beside the optimizer's states, which "
        "zero.optimizer.to nvme keeps on a disk; set it to cpu or device, or ema_decay to null"
    )
