"""What DDP sends of gradients, and keeps to send less: parameters and options in, elements out.

Source: `powerSGD_hook` of torch.distributed, with its defaults: a matrix is sent as two factors
where that is less than half of it, and what the factors lose is kept for the next step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from diptych.core.records import Layout, Parameter
from diptych.plan.sharding import DTYPE_BYTES

_LEAST_RATE = 2


@dataclass(frozen=True)
class Factors:
    """Elements of gradients that travel as two factors, and of those that travel whole."""

    num_factor_elements: int
    num_whole_elements: int


def factors(parameters: Iterable[Parameter], *, rank: int) -> Factors:
    """Say what PowerSGD makes of gradients, at a rank of its factors."""
    num_factor_elements = num_whole_elements = 0
    for parameter in parameters:
        rows, num_elements = parameter.shape[0], math.prod(parameter.shape)
        columns = num_elements // rows
        in_factors = (rows + columns) * min(rows, columns, rank)
        if _LEAST_RATE * in_factors < num_elements:
            num_factor_elements += in_factors
        else:
            num_whole_elements += num_elements
    return Factors(num_factor_elements, num_whole_elements)


def gradient_bytes(parameters: Iterable[Parameter], *, layout: Layout) -> int:
    """Return the bytes that one reduction of all gradients carries."""
    listed = list(parameters)
    if layout.ddp.compression == "powersgd":
        made = factors(listed, rank=layout.ddp.powersgd_rank)
        return 4 * (made.num_factor_elements + made.num_whole_elements)
    half = layout.ddp.compression != "none"
    element = 2 if half else DTYPE_BYTES[layout.mixed_precision.reduce]
    return element * sum(math.prod(each.shape) for each in listed)


def kept_bytes(parameters: Iterable[Parameter], *, layout: Layout) -> int:
    """Return the bytes that compression keeps from step to step: errors and factors."""
    if layout.dp == 1 or layout.ddp.compression != "powersgd":
        return 0
    listed = list(parameters)
    made = factors(listed, rank=layout.ddp.powersgd_rank)
    errors = sum(math.prod(each.shape) for each in listed)
    return 4 * (errors + made.num_factor_elements)
