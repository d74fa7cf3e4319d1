"""What only the machine at hand can say of a layout: packages, a compiler, a disk, its room.

In: a layout and the model's size. Out: nothing, or the reason why no rank should start. What a
layout and a model say by themselves, the planner has refused before. No torch.
"""

from __future__ import annotations

import ctypes.util
import importlib.util
import os
import shutil
from collections import Counter
from pathlib import Path

from diptych.core.errors import LayoutError
from diptych.core.packages import missing_kernels
from diptych.core.records import Layout, OptimizerKind
from diptych.core.units import format_bytes

_STATE_BYTES = 16
"""Of a trained parameter, where the optimizer is on a disk: fp32 weight, gradient, two moments."""
_WEIGHT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


def check_machine(
    layout: Layout, *, num_parameters: int | None, optimizer: OptimizerKind = "adamw"
) -> None:
    """Refuse what this machine lacks.

    Args:
        layout: what is to run.
        num_parameters: of the model; asked for where a disk must hold them.
        optimizer: what updates its weights.

    Raises:
        LayoutError: a package, a compiler, a folder or room on its disk is missing.
    """
    if layout.engine == "zero":
        _need_package("deepspeed", setting="plan.layout.engine zero", cure="pip install deepspeed")
        _check_offload(layout, num_parameters=num_parameters)
    if layout.mixed_precision.fp8:
        _need_package(
            "torchao",
            setting="plan.layout.mixed_precision.fp8",
            cure="pip install 'diptych[fp8]', or set it to []",
        )
    if optimizer == "adamw_8bit":
        setting = "train.optimizer.kind adamw_8bit"
        _need_package("torchao", setting=setting, cure="pip install 'diptych[fp8]'")
        if layout.device == "cpu":
            _need_compiler(setting, cure="set train.optimizer.kind to adamw")
    if layout.memory.loss == "fused":
        _need_package(
            "liger_kernel",
            setting="plan.layout.memory.loss fused",
            cure="pip install 'diptych[gpu]', or set it to chunked",
        )
    if layout.attention != "auto":
        missing = missing_kernels(tries_import=False).get(layout.attention)
        if missing:
            raise LayoutError(
                f"plan.layout.attention is {layout.attention}, and {missing}",
                cure="Install it for your CUDA and torch (docs/attention.md), or set it to auto",
            )
    if layout.compile.blocks and layout.device == "cpu":
        _need_compiler("plan.layout.compile", cure="set compile.blocks to []")


def _check_offload(layout: Layout, *, num_parameters: int | None) -> None:
    optimizer, parameters = layout.zero.optimizer, layout.zero.parameters
    if optimizer.to != "device" and optimizer.adam == "deepspeed":
        _need_kernel(f"plan.layout.zero.optimizer.to {optimizer.to} with adam deepspeed")
    needed: Counter[Path] = Counter()
    for setting, offload, num_bytes in (
        ("plan.layout.zero.optimizer", optimizer, _STATE_BYTES),
        ("plan.layout.zero.parameters", parameters, _WEIGHT_BYTES[layout.precision]),
    ):
        if offload.to == "nvme" and offload.path is not None:
            _check_folder(Path(offload.path), setting=f"{setting}.path")
            needed[Path(offload.path)] += num_bytes * (num_parameters or 0)
    if needed:
        _need_aio()
    for path, num_bytes in needed.items():
        free = shutil.disk_usage(path).free
        if num_bytes > free:
            raise LayoutError(
                f"The states to offload take {format_bytes(num_bytes)}, and {path} has "
                f"{format_bytes(free)} free",
                cure="Free some room, name a larger disk, or offload to the host's memory",
            )


def _need_kernel(setting: str) -> None:
    _need_compiler(setting, cure="set zero.optimizer.adam to torch, which is slower")
    if shutil.which("ninja") is None:
        raise LayoutError(
            f"{setting} compiles a kernel on first use, and ninja is not installed",
            cure="Run: pip install ninja; or set zero.optimizer.adam to torch",
        )


def _need_aio() -> None:
    _need_compiler("Offloading to NVMe", cure="use {to: cpu, adam: torch} instead")
    if ctypes.util.find_library("aio") is None:
        raise LayoutError(
            "Offloading to NVMe needs libaio, which is not installed",
            cure="Run: apt install libaio-dev (or your system's package), or set to: cpu",
        )


def _check_folder(path: Path, *, setting: str) -> None:
    if not path.is_dir():
        found = "is no folder" if path.exists() else "does not exist"
        raise LayoutError(
            f"{setting} is {path}, which {found}",
            cure="Mount the disk, or make the folder, on every node",
        )
    if not os.access(path, os.W_OK | os.X_OK):
        raise LayoutError(
            f"{setting} is {path}, where this user may not write",
            cure=f"Run: chown {os.environ.get('USER', 'you')} {path}; or name another folder",
        )


def _need_package(name: str, *, setting: str, cure: str) -> None:
    if importlib.util.find_spec(name) is None:
        raise LayoutError(f"{setting} needs {name}, which is not installed", cure=f"Run: {cure}")


def _need_compiler(setting: str, *, cure: str) -> None:
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise LayoutError(
            f"{setting} needs a C++ compiler, and {compiler} is not installed",
            cure=f"Install g++ (or set CXX), or {cure}",
        )
