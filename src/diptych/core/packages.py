"""Which packages of Flash Attention are installed: nothing in, the reasons against each out.

Two of them share one module, so distributions are asked for by name. Nothing is imported unless
that is asked for.
"""

from __future__ import annotations

import importlib
from importlib import metadata

from diptych.core.records import Kernel

_PACKAGES: dict[Kernel, tuple[str, str]] = {
    "flash_2": ("flash-attn", "flash_attn"),
    "flash_3": ("flash-attn-3", "flash_attn_interface"),
    "flash_4": ("flash-attn-4", "flash_attn.cute"),
}
"""The distribution and the module of each kernel that is no part of torch.

Source: `is_flash_attn_2_available` and those after it, of transformers.
"""


def missing_kernels(*, tries_import: bool) -> dict[Kernel, str]:
    """Say why packages of kernels cannot be used; those that can are left out.

    Args:
        tries_import: import what is installed, which takes torch and a GPU's libraries, and finds
            a package that was built for others.
    """
    missing: dict[Kernel, str] = {}
    for kernel, (distribution, module) in _PACKAGES.items():
        try:
            metadata.version(distribution)
        except metadata.PackageNotFoundError:
            missing[kernel] = f"{distribution} is not installed"
            continue
        if tries_import:
            try:
                importlib.import_module(module)
            except (ImportError, OSError, RuntimeError, AttributeError) as error:
                told = str(error).splitlines()[0] if str(error) else type(error).__name__
                missing[kernel] = f"{distribution} cannot be imported: {told}"
    return missing
