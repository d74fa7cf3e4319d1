"""The machine as numbers: a person's overrides in, a cluster out.

What is not overridden is read from this machine: cores and memory as affinity and control groups
allow them, GPUs through NVML. What cannot be known is None, never a guess.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Literal

from pydantic import Field

from diptych.core.errors import ConfigError
from diptych.core.host import read_text, usable_cores, usable_memory_bytes
from diptych.core.nvml import select_visible
from diptych.core.records import Cluster, Device, Section
from diptych.plan.gpus import rates_of


class ClusterParams(Section):
    """`plan.cluster` in the parameters; null is read from the machine that plans."""

    num_nodes: int = Field(default=1, ge=1)
    num_devices_per_node: int | None = Field(default=None, ge=1)
    device_kind: Literal["auto", "cpu", "cuda"] = "auto"
    device_name: str | None = None
    device_memory_bytes: int | None = Field(default=None, ge=1)
    flops_per_s: dict[Literal["bf16", "fp16", "fp32"], float] | None = None
    memory_bytes_per_s: float | None = Field(default=None, gt=0)
    link_bytes_per_s: float | None = Field(default=None, gt=0)
    num_cores_per_node: int | None = Field(default=None, ge=1)
    host_memory_bytes: int | None = Field(default=None, ge=1)


def survey(cluster: ClusterParams) -> Cluster:
    """Describe the cluster: what a person wrote, and for the rest this machine.

    A node without GPUs is one device, its memory shared by all ranks.

    Raises:
        ConfigError: GPUs are asked for, there is none here, and their memory is not given.
    """
    found = [] if cluster.device_kind == "cpu" else visible_gpus()
    if cluster.device_kind == "cuda" or found:
        read = _read_gpus(found, params=cluster)
    else:
        memory_bytes = cluster.host_memory_bytes or usable_memory_bytes()
        read = _Read(kind="cpu", name=_processor_name(), memory_bytes=memory_bytes)
    return Cluster(
        num_nodes=cluster.num_nodes,
        num_devices_per_node=cluster.num_devices_per_node or read.num_devices,
        device=Device(
            kind=read.kind,
            name=cluster.device_name or read.name,
            memory_bytes=cluster.device_memory_bytes or read.memory_bytes,
            flops_per_s={
                str(precision): rate
                for precision, rate in (cluster.flops_per_s or read.flops_per_s).items()
            },
            memory_bytes_per_s=cluster.memory_bytes_per_s or read.memory_bytes_per_s,
        ),
        num_cores_per_node=cluster.num_cores_per_node or usable_cores(),
        host_memory_bytes=cluster.host_memory_bytes or usable_memory_bytes(),
        link_bytes_per_s=cluster.link_bytes_per_s or read.link_bytes_per_s,
    )


@dataclass(frozen=True, kw_only=True)
class _Read:
    """What this machine says of its devices."""

    kind: Literal["cpu", "cuda"]
    name: str
    memory_bytes: int
    num_devices: int = 1
    flops_per_s: Mapping[str, float] = field(default_factory=dict)
    memory_bytes_per_s: float | None = None
    link_bytes_per_s: float | None = None


def _read_gpus(found: list[tuple[str, int]], *, params: ClusterParams) -> _Read:
    """Describe the GPUs that were found, and their rates by the name that counts."""
    if not found and params.device_memory_bytes is None:
        raise ConfigError(
            "plan.cluster.device_kind is 'cuda', and this machine shows no GPU",
            cure="Give plan.cluster.device_memory_bytes too, or set device_kind: auto",
        )
    name = params.device_name or (found[0][0] if found else "unknown GPU")
    # Ranks are alike, so the smallest device decides what fits.
    memory_bytes = min((each for _, each in found), default=0)
    read = _Read(kind="cuda", name=name, memory_bytes=memory_bytes, num_devices=max(1, len(found)))
    rates = rates_of(name)
    if rates is None:
        return read
    return replace(
        read,
        flops_per_s=rates.flops_per_s,
        memory_bytes_per_s=rates.memory_bytes_per_s,
        link_bytes_per_s=rates.link_bytes_per_s,
    )


def visible_gpus() -> list[tuple[str, int]]:
    """List (name, memory in bytes) of the GPUs that torch would use; empty where there are none."""
    if "+cpu" in _torch_version():
        return []
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        handles = [
            pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())
        ]
        uuids = [str(pynvml.nvmlDeviceGetUUID(handle)) for handle in handles]
        return [
            (
                str(pynvml.nvmlDeviceGetName(handles[index])),
                int(pynvml.nvmlDeviceGetMemoryInfo(handles[index]).total),
            )
            for index in select_visible(os.environ.get("CUDA_VISIBLE_DEVICES"), uuids=uuids)
        ]
    finally:
        pynvml.nvmlShutdown()


def _torch_version() -> str:
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return ""


def _processor_name() -> str:
    text = read_text(Path("/proc/cpuinfo")) or ""
    for line in text.splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine() or "CPU"
