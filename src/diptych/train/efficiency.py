"""What a step computed, and what the devices could have: counts of a batch in, MFU and HFU out.

Model FLOPs are those that the batch's own tokens and patches need (PaLM's definition): no padding,
no filler, nothing twice. Hardware FLOPs count all places of rows, and what is recomputed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from diptych.core.records import Layout, ModelShape
from diptych.shape.counts import BatchCounts
from diptych.shape.flops import recomputed_flops, train_flops, with_windows
from diptych.train.exchange import Counts

_NONE = BatchCounts(
    num_tokens=0,
    squared_tokens=0,
    num_patches=0,
    squared_patches=0,
    num_head_tokens=0,
    squared_windows=0,
)
_COUNTED = tuple(vars(_NONE))


@dataclass(frozen=True)
class StepFlops:
    """What a step computed: fields of a `StepRecord`; the shares are None without a peak."""

    model_flops: float
    hardware_flops: float
    mfu: float | None
    hfu: float | None


class Efficiency:
    """Counts a model's FLOPs, step after step.

    Args:
        model_shape: the model.
        layout: how it is spread, and what it recomputes.
        flops_per_s: the peak of one device; None where it is not known.
    """

    def __init__(
        self, model_shape: ModelShape, *, layout: Layout, flops_per_s: float | None
    ) -> None:
        self._shape = model_shape
        self._train = _per_count(lambda counts: train_flops(model_shape, counts=counts))
        self._again = _per_count(
            lambda counts: recomputed_flops(model_shape, counts=counts, memory=layout.memory)
        )
        self._peak = None if flops_per_s is None else flops_per_s * layout.world_size

    def of(self, counts: Counts, *, step_s: float) -> StepFlops:
        """Return what a step of so many seconds computed, over all ranks."""
        real = with_windows(
            self._shape,
            counts=BatchCounts(
                num_tokens=counts.num_text_tokens + counts.num_image_tokens,
                squared_tokens=counts.squared_tokens,
                num_patches=counts.num_patches,
                squared_patches=counts.squared_patches,
                num_head_tokens=counts.num_label_tokens,
            ),
        )
        padded = vars(real) | {
            "num_tokens": counts.num_slots,
            "squared_tokens": counts.squared_slots,
        }
        model = _total(self._train, counts=vars(real))
        hardware = _total(self._train, counts=padded)
        hardware += _total(self._again, counts=padded)
        could = None if self._peak is None else self._peak * step_s
        return StepFlops(
            model_flops=model,
            hardware_flops=hardware,
            mfu=None if could is None else model / could,
            hfu=None if could is None else hardware / could,
        )


def _per_count(flops: Callable[[BatchCounts], float]) -> dict[str, float]:
    """Return what each count costs; listing all parameters in every step would take too long."""
    return {name: flops(BatchCounts(**{**vars(_NONE), name: 1})) for name in _COUNTED}


def _total(per_count: dict[str, float], *, counts: Mapping[str, float | None]) -> float:
    return sum(cost * (counts[name] or 0) for name, cost in per_count.items())
