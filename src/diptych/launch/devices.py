"""What a rank's machine is like: GPUs, links, kernels, memory, limits. Nothing in, checks out.

GPUs are asked through NVML, whose module is handed in, so that its answers can be made up. Every
check says `skip` where there is nothing to ask. Only workers import this. Has run on no GPU yet.
"""

from __future__ import annotations

import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.cuda.nccl import version as nccl_version

from diptych.core.host import read_text
from diptych.core.nvml import BENIGN_THROTTLE, ask
from diptych.core.packages import missing_kernels
from diptych.core.records import Check
from diptych.core.units import format_bytes

_SHM_BYTES = 1 << 30
_HOST_FRACTION = 0.1
_DEVICE_FRACTION = 0.9
_NUM_FILES = 4096


def check_devices(nvml: Any = None, *, index: int = 0) -> Iterator[Check]:
    """Look at this rank's machine.

    Args:
        nvml: the module `pynvml`, initialised; None where there is no GPU.
        index: NVML's, of this rank's GPU.
    """
    yield check_torch()
    yield check_kernels()
    yield _guarded("driver", lambda: check_driver(nvml), skips=nvml is None)
    yield _guarded("gpu", lambda: check_gpu(nvml, index=index), skips=nvml is None)
    yield _guarded("links", lambda: check_links(nvml, index=index), skips=nvml is None)
    yield check_infiniband()
    yield check_memory()
    yield check_shared_memory()
    yield check_files()


def check_torch() -> Check:
    """Say which torch this is, and what it was built with."""
    cuda = torch.version.cuda
    nccl = ".".join(map(str, nccl_version())) if cuda else None
    built = f", CUDA {cuda}, NCCL {nccl}" if cuda else ", without CUDA"
    return _pass("torch", f"{torch.__version__}{built}")


def check_kernels() -> Check:
    """Say which of the attention packages can be imported."""
    missing = missing_kernels(tries_import=True)
    there = [name for name in ("flash_2", "flash_3", "flash_4") if name not in missing]
    return _pass("attention", ", ".join(["sdpa", "flex", *there]))


def check_driver(nvml: Any) -> Check:
    """Say which driver the GPUs have."""
    cuda = nvml.nvmlSystemGetCudaDriverVersion_v2()
    version = _text(nvml.nvmlSystemGetDriverVersion())
    return _pass("driver", f"{version}, for CUDA up to {cuda // 1000}.{cuda % 1000 // 10}")


def check_gpu(nvml: Any, *, index: int) -> Check:
    """Look at a GPU's memory, at errors that its memory had, and at what slows it down."""
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    name = _text(nvml.nvmlDeviceGetName(handle))
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    errors = ask(
        nvml,
        lambda: nvml.nvmlDeviceGetTotalEccErrors(
            handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        ),
    )
    reasons = ask(nvml, lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)) or 0
    told = f"{name}, {format_bytes(memory.free)} of {format_bytes(memory.total)} free"
    if errors:
        return Check(
            name="gpu",
            status="fail",
            found=f"{told}; {errors} memory errors that could not be corrected",
            cure="Have the node drained, and the GPU reset or replaced",
        )
    if memory.free < _DEVICE_FRACTION * memory.total:
        return Check(name="gpu", status="warn", found=told, cure="See who else uses it: nvidia-smi")
    if reasons & ~BENIGN_THROTTLE:
        return Check(
            name="gpu",
            status="warn",
            found=f"{told}; slowed down (reasons {reasons:#x})",
            cure="See power and temperature: nvidia-smi -q -d PERFORMANCE",
        )
    return _pass("gpu", told)


def check_links(nvml: Any, *, index: int) -> Check:
    """Say how a GPU reaches the node's others: by NVLink, over PCIe, or through the host."""
    num_devices = nvml.nvmlDeviceGetCount()
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    num_links = 0
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        state = ask(nvml, lambda link=link: nvml.nvmlDeviceGetNvLinkState(handle, link))
        num_links += state == nvml.NVML_FEATURE_ENABLED
    generation = ask(nvml, lambda: nvml.nvmlDeviceGetCurrPcieLinkGeneration(handle))
    width = ask(nvml, lambda: nvml.nvmlDeviceGetCurrPcieLinkWidth(handle))
    others = [nvml.nvmlDeviceGetHandleByIndex(each) for each in range(num_devices) if each != index]
    apart = [
        other
        for other in others
        if ask(
            nvml,
            lambda other=other: nvml.nvmlDeviceGetP2PStatus(
                handle, other, nvml.NVML_P2P_CAPS_INDEX_READ
            ),
        )
        != nvml.NVML_P2P_STATUS_OK
    ]
    told = f"{num_links} NVLinks, PCIe {generation} x{width}"
    if apart:
        return Check(
            name="links",
            status="warn",
            found=f"{told}; no direct way to {len(apart)} of {len(others)} other GPUs",
            cure="What crosses them goes through the host's memory; see nvidia-smi topo -m",
        )
    return _pass("links", told)


def check_infiniband(root: Path = Path("/sys/class/infiniband")) -> Check:
    """List the InfiniBand and RoCE ports, and which of them are not up."""
    if not root.is_dir():
        return Check(name="infiniband", status="skip", found="no adapter here")
    states = {
        f"{port.parent.parent.name}:{port.name}": _port_state(port)
        for port in sorted(root.glob("*/ports/*"))
    }
    told = ", ".join(f"{name} {state}" for name, state in states.items()) or "no port"
    if all(state.startswith("ACTIVE") for state in states.values()):
        return _pass("infiniband", told)
    return Check(
        name="infiniband",
        status="warn",
        found=told,
        cure="See that its cable and the subnet manager are up (ibstat), or leave it out: "
        "train.launch.network.infiniband_devices",
    )


def _port_state(port: Path) -> str:
    state, rate = (read_text(port / name) or "unknown" for name in ("state", "rate"))
    return f"{state.rpartition(':')[2].strip()} {rate}"


def check_memory() -> Check:
    """Say how much of the host's memory is free."""
    memory = psutil.virtual_memory()
    told = f"{format_bytes(memory.available)} of {format_bytes(memory.total)} free"
    if memory.available < _HOST_FRACTION * memory.total:
        return Check(
            name="host memory", status="warn", found=told, cure="See who else uses it: top -o %MEM"
        )
    return _pass("host memory", told)


def check_shared_memory(path: Path = Path("/dev/shm")) -> Check:
    """Say how much shared memory is free: batches travel through it from loader processes."""
    if not path.is_dir():
        return Check(name="shared memory", status="skip", found=f"{path} is not there")
    free = shutil.disk_usage(path).free
    if free < _SHM_BYTES:
        return Check(
            name="shared memory",
            status="warn",
            found=f"{format_bytes(free)} free in {path}",
            cure="Start the container with --shm-size=8g or --ipc=host, or set "
            "train.num_workers to 0",
        )
    return _pass("shared memory", f"{format_bytes(free)} free in {path}")


def check_files() -> Check:
    """Say how many files a rank may have open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < _NUM_FILES:
        return Check(
            name="open files",
            status="warn",
            found=f"at most {soft} (could be {hard})",
            cure=f"Run: ulimit -n {_NUM_FILES}",
        )
    return _pass("open files", f"at most {soft}")


def _guarded(name: str, look: Callable[[], Check], *, skips: bool) -> Check:
    """Look, where there is a GPU; what a driver does not answer keeps no run from starting."""
    if skips:
        return Check(name=name, status="skip", found="no GPU here")
    try:
        return look()
    except Exception as error:  # NVML's errors are of a class that its module makes
        return Check(name=name, status="skip", found=f"NVML does not say ({error})")


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _pass(name: str, found: str) -> Check:
    return Check(name=name, status="pass", found=found)
