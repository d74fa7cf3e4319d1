"""Linear layers that compute in fp8: units flow in, their linear layers are replaced in place.

torchao does the work (scales from each tensor's largest value, weights stay in high precision).
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

import torch
from torch import nn

from diptych.core.errors import LayoutError
from diptych.model.families import Unit

FIRST_WITH_FP8 = (8, 9)
"""The compute capability (Ada) from which CUDA devices multiply in fp8."""
_MULTIPLE = 16
"""The kernels take matrices whose sides are multiples of this."""


def apply(
    units: Sequence[Unit], *, towers: Sequence[str], device: torch.device, emulate: bool = False
) -> None:
    """Have the linear layers of the chosen towers' blocks compute in fp8.

    A layer with a side that is not a multiple of 16 stays as it is.

    Args:
        units: the model's units.
        towers: whose blocks; none leaves all as they are.
        device: where the model is.
        emulate: round as fp8 does and multiply in high precision, on any device; for tests.

    Raises:
        LayoutError: the device has no fp8, torchao is not installed, or no layer fits.
    """
    if not towers:
        return
    if not emulate:
        _check_device(device)
    if find_spec("torchao") is None:
        raise LayoutError(
            "mixed_precision.fp8 needs torchao, which is not installed",
            cure="Run: pip install 'diptych[fp8]', or set mixed_precision.fp8 to []",
        )
    from torchao.float8 import (  # pyright: ignore[reportMissingImports]
        Float8LinearConfig,
        convert_to_float8_training,
    )

    num_replaced = 0

    def fits(module: nn.Module, name: str) -> bool:
        nonlocal num_replaced
        chosen = isinstance(module, nn.Linear) and not any(
            side % _MULTIPLE for side in module.weight.shape
        )
        num_replaced += chosen
        return chosen

    for unit in units:
        if unit.is_block and unit.tower in towers:
            convert_to_float8_training(
                unit.module, config=Float8LinearConfig(emulate=emulate), module_filter_fn=fits
            )
    if not num_replaced:
        raise LayoutError(
            f"No linear layer of {', '.join(towers)} can compute in fp8",
            allowed=f"Layers whose sides are multiples of {_MULTIPLE}",
            cure="Set mixed_precision.fp8 to []",
        )


def _check_device(device: torch.device) -> None:
    found = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    if found is None or found < FIRST_WITH_FP8:
        name = torch.cuda.get_device_name(device) if found else "A CPU"
        raise LayoutError(
            f"{name} does not compute in fp8",
            allowed="GPUs of compute capability 8.9 (Ada, Hopper) or later",
            cure="Set mixed_precision.fp8 to []",
        )
