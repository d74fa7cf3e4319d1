"""The environment that ranks talk in: typed settings in, environment variables out.

Knows the variables' names of NCCL, gloo and torch; a variable that a person has set already wins
over what is not said in the settings.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

from diptych.core.records import NetworkSpec, RunSpec

_DEBUG = {"version": "VERSION", "warn": "WARN", "info": "INFO", "trace": "TRACE"}
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def environment(network: NetworkSpec, *, logs: Path) -> dict[str, str]:
    """Return the variables that settings stand for; what is left to the libraries is not in it.

    Args:
        network: the settings.
        logs: the folder that a rank's flight recorder writes to.

    Source: NCCL's page of environment variables; `c10/util/env.h` and `FlightRecorder` of torch.
    """
    chosen: dict[str, str | None] = {
        **dict.fromkeys(INTERFACES, network.interface),
        "NCCL_IB_DISABLE": {"auto": None, "on": "0", "off": "1"}[network.infiniband],
        "NCCL_IB_HCA": network.infiniband_devices,
        "NCCL_ALGO": _unless_auto(network.algorithm),
        "NCCL_PROTO": _unless_auto(network.protocol),
        "NCCL_P2P_DISABLE": {"auto": None, "off": "1"}[network.peer_to_peer],
        "NCCL_DEBUG": _DEBUG.get(network.debug),
        **_recorder(network.flight_recorder_entries, logs=logs),
        **network.variables,
    }
    return {name: value for name, value in chosen.items() if value is not None}


def rank_environment(spec: RunSpec, *, logs: Path) -> dict[str, str]:
    """Return what every rank's environment has beside what its machine's has.

    Args:
        spec: the run's spec.
        logs: the folder of its ranks' logs.
    """
    threads = str(spec.placement.threads_per_rank)
    return {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "TOKENIZERS_PARALLELISM": "false",
        # Large blocks come in huge pages: touching a fresh 59 MB tensor took 8 ms instead of 38.
        "THP_MEM_ALLOC_ENABLE": "1",
        # Ranks that are told to end save first.
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "60",
        # A restarted generation must not dial the store of the one before it.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        **_allocator(spec),
        **environment(spec.placement.launch.network, logs=logs),
    }


def python_path() -> str:
    """Return PYTHONPATH with this package's sources in front."""
    source = str(Path(__file__).resolve().parents[2])
    return os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])])


def loopback() -> dict[str, str]:
    """Have the ranks of one machine talk over loopback, unless a person chose another interface."""
    names = {name for _, name in socket.if_nameindex()} & {"lo", "lo0"}
    return {name: names.copy().pop() for name in INTERFACES if names and name not in os.environ}


def _unless_auto(value: str) -> str | None:
    return None if value == "auto" else value.upper().replace("_", "")


def _recorder(num_entries: int, *, logs: Path) -> dict[str, str]:
    """Have NCCL's watchdog write each rank's last collectives where one of them hangs."""
    if not num_entries:
        return {}
    file = str(logs.absolute() / "collectives-rank-")
    return {
        "TORCH_FR_BUFFER_SIZE": str(num_entries),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        # Under its present name and its former one.
        "TORCH_FR_DUMP_TEMP_FILE": file,
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": file,
    }


def _allocator(spec: RunSpec) -> dict[str, str]:
    """Hand the allocator's settings to torch, under its present name and its former one."""
    settings = spec.placement.layout.memory.allocator
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    return dict.fromkeys(names, settings) if settings else {}
