"""What runs in Ray's own processes: the address where ranks meet, and each rank as a child.

A rank is the same `python -m diptych.worker` as everywhere, not a thread of Ray's: so it can take
signals, and knows nothing of Ray. Ranks get torch's environment and make the process group
themselves (`parallel/mesh.py`).
"""

from __future__ import annotations

import ipaddress
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import ray
import ray.train
from ray.train.backend import Backend, BackendConfig

from diptych.core.errors import RunError
from diptych.launch import process
from diptych.launch.network import INTERFACES
from diptych.launch.notes import write_note
from diptych.launch.words import how_ended, rank_log


class RankEnded(Exception):
    """A rank's process ended before its work did.

    Attributes:
        rank: which.
        code: its exit code, minus the signal's number where one killed it.
        ended_s: when, in seconds since 1970.
        host: where.
    """

    def __init__(self, rank: int, code: int, ended_s: float, host: str) -> None:
        super().__init__(rank, code, ended_s, host)
        self.rank, self.code, self.ended_s, self.host = rank, code, ended_s, host

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} {how_ended(self.code)}"


class Meeting(Backend):
    """Tells every rank where the first one listens."""

    share_cuda_visible_devices = True

    def on_start(self, worker_group: Any, backend_config: BackendConfig) -> None:
        """Find a free port where rank 0 is, and tell it to all."""
        address, port = worker_group.execute_single(0, _free_address)
        worker_group.execute(_set_meeting, address=address, port=port)


@dataclass
class Environment(BackendConfig):
    """In the place of Ray's `TorchConfig`: no process group, no CUDA context, and no torch.

    Ray's processes would each take seconds to import it, with every start anew.
    """

    backend: str = "gloo"

    @property
    def backend_cls(self) -> type[Backend]:
        """What is done before the ranks start."""
        return Meeting


class News(ray.train.UserCallback):
    """Says which rank ended first, whenever that happens; lives in Ray Train's controller."""

    def __init__(self, logs: Path, *, max_restarts: int) -> None:
        self._logs = logs
        self._max_restarts = max_restarts
        self._num_failures = 0

    def after_exception(self, run_context: Any, worker_exceptions: Mapping[int, Any]) -> None:
        """Say it, and whether the ranks are started again."""
        self._num_failures += 1
        if self._num_failures <= self._max_restarts:
            rank, text, _ = first_failure(worker_exceptions)
            again = f"restart {self._num_failures} of {self._max_restarts}"
            write_note(self._logs, "news", f"rank {rank} {text}: {again}")


def first_failure(failures: Mapping[int, Any]) -> tuple[int, str, RankEnded | None]:
    """Return which rank failed first, how, and its end where it is known.

    A worker of Ray's that is gone took its rank with it; the others ended because of that.
    """
    found = {rank: getattr(error, "_base_exc", error) for rank, error in failures.items()}
    ended = {rank: error for rank, error in found.items() if isinstance(error, RankEnded)}
    for rank, error in found.items():
        if rank not in ended:
            return rank, f"was lost with its Ray worker ({_first_line(error)})", None
    rank = min(ended, key=lambda rank: ended[rank].ended_s)
    return rank, f"on {ended[rank].host} {how_ended(ended[rank].code)}", ended[rank]


def run_rank(config: dict[str, Any]) -> None:
    """Run one rank to its end, as a child that ends with this process.

    Args:
        config: `run` and `logs`, the folders; `folder`, the project's; `environment`, the ranks'.

    Raises:
        RankEnded: it failed or was killed.
    """
    context = ray.train.get_context()
    rank, host = context.get_world_rank(), socket.gethostname()
    if not Path(config["run"]).is_dir() or not Path(config["folder"]).is_dir():
        raise RunError(
            f"{host} has no folder {config['run']}",
            cure="Every node of the cluster needs the project's folder at the same path",
        )
    if rank == 0:
        note = f"{context.get_world_size()} ranks are started; rank 0 is on {host}"
        write_note(Path(config["logs"]), "news", note)
    with rank_log(Path(config["logs"]), rank=rank).open("ab") as log:
        child = subprocess.Popen(
            [sys.executable, "-m", "diptych.worker", "train", config["run"], config["logs"]],
            cwd=config["folder"],
            env=_environment(config["environment"], context=context),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # No time to save: where a rank's worker is killed, the others wait in vain for it.
            preexec_fn=partial(process.die_with_parent, signal.SIGKILL),
        )
    code = child.wait()
    if code:
        raise RankEnded(rank, code, time.time(), host)


def _environment(variables: Mapping[str, str], *, context: Any) -> dict[str, str]:
    own = {**os.environ, **variables}
    named = interface_variables(ray.util.get_node_ip_address())
    return {
        **{name: value for name, value in named.items() if name not in own},
        **own,
        "RANK": str(context.get_world_rank()),
        "WORLD_SIZE": str(context.get_world_size()),
        "LOCAL_RANK": str(context.get_local_rank()),
        "LOCAL_WORLD_SIZE": str(context.get_local_world_size()),
        "NODE_RANK": str(context.get_node_rank()),
    }


def interface_variables(address: str) -> dict[str, str]:
    """Have ranks talk over the interface that Ray's nodes talk over.

    gloo would take the one that the host's name leads to, which may be another machine's network.
    NCCL finds its own, unless all are on one machine's loopback.
    """
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == address for each in addresses):
            both = INTERFACES if ipaddress.ip_address(address).is_loopback else INTERFACES[:1]
            return dict.fromkeys(both, name)
    return {}


def _free_address() -> tuple[str, int]:
    address = ray.util.get_node_ip_address()
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((address, 0))
        return address, probe.getsockname()[1]


def _set_meeting(address: str, port: int) -> None:
    os.environ.update(MASTER_ADDR=address, MASTER_PORT=str(port))


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
