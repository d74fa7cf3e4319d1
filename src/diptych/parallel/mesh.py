"""The process group, this rank's device, and the mesh of a layout.

In: the environment that torch elastic sets. Out: a `World`. Knows nothing of models or data.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from diptych.core.errors import LayoutError
from diptych.core.records import Layout

_LOG = logging.getLogger(__name__)
TIMEOUT_S = 600.0
_BACKLOG = 1024


@dataclass(frozen=True)
class World:
    """This rank's place: its number, how many there are, and its device."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        """Whether this rank writes what is written once."""
        return self.rank == 0


def join(layout: Layout, *, timeout_s: float = TIMEOUT_S) -> World:
    """Join the process group that torch elastic describes.

    gloo for what is in the host's memory (a CPU's tensors, `gather_numbers`, FSDP2's shards that
    are kept there), nccl for what is on GPUs.

    Args:
        layout: how the run is spread.
        timeout_s: how long a collective may take.

    Raises:
        LayoutError: the number of processes is not the layout's world size, or a device is missing.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    timeout = timedelta(seconds=timeout_s)
    if size != layout.world_size:
        raise LayoutError(
            f"{size} processes were started for a layout of {layout.world_size} ranks",
            cure="Start as many processes as dp x shard x tp x pp x cp",
        )
    if layout.device == "cuda":
        if not torch.cuda.is_available():
            raise LayoutError(
                "The layout asks for CUDA devices and torch sees none",
                cure="Set plan.layout.device to cpu, or install a CUDA build of torch",
            )
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl", timeout=timeout, device_id=device, **_meeting_point(timeout)
        )
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo", timeout=timeout, **_meeting_point(timeout))
    return World(rank=dist.get_rank(), size=dist.get_world_size(), device=device)


def _meeting_point(timeout: timedelta) -> dict[str, Any]:
    """Open the store that ranks meet at, on the one address that they are told to dial.

    Differs: torch's own listens on every address of the machine, and asks nobody who they are.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return {}  # the launcher listens, and has begun to
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
        host,
        port,
        world_size=size,
        is_master=rank == 0,
        timeout=timeout,
        master_listen_fd=_listen(host, port=port) if rank == 0 else None,
    )
    return {"store": store, "rank": rank, "world_size": size}


def _listen(host: str, *, port: int) -> int | None:
    """Listen on an address; None where it is no address of this machine, but leads to it."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno != errno.EADDRNOTAVAIL:
            raise
        _LOG.warning("%s is no address of this machine: port %d listens on all", host, port)
        return None
    return listener.detach()


def leave() -> None:
    """Leave the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def build_mesh(layout: Layout) -> DeviceMesh:
    """Build the mesh over the axes that the layout uses: `dp` copies of `shard` shards.

    Raises:
        LayoutError: an axis that is not built yet is larger than one.
    """
    for axis in ("tp", "pp", "cp"):
        if getattr(layout, axis) > 1:
            raise LayoutError(
                f"The axis {axis} of size {getattr(layout, axis)} is not built yet",
                allowed="dp and shard can be larger than one",
                cure=f"Set {axis} to 1",
            )
    sizes = (layout.dp, layout.shard)
    return init_device_mesh(layout.device, sizes, mesh_dim_names=("dp", "shard"))


def gather_numbers(values: Sequence[float], *, world: World) -> np.ndarray:
    """Collect a few numbers of every rank: [world size, len(values)] float64, equal everywhere."""
    return begin_gather(values, world=world)()


def begin_gather(values: Sequence[float], *, world: World) -> Callable[[], np.ndarray]:
    """Begin what `gather_numbers` does, and return what waits for its result.

    The numbers travel from the host's memory by gloo, in a thread of its own, while the rank
    computes. On GPUs too: they have no place in a stream and never wait for the device, as they
    would with nccl, in whose queue they would stand before and behind gradients.
    """
    if world.size == 1:
        alone = np.array([values], dtype=np.float64)
        return lambda: alone
    local = torch.tensor(values, dtype=torch.float64)
    gathered = torch.empty((world.size, len(values)), dtype=torch.float64)
    # Recent torch has renamed it.
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    work = gather(gathered.view(-1), local, async_op=True)
    assert work is not None, "every rank is in the group"

    def wait() -> np.ndarray:
        work.wait()
        return gathered.numpy()

    return wait


def gather_texts(text: str, *, world: World) -> list[str]:
    """Collect a text of every rank, equal everywhere; as bytes, for objects travel as pickles."""
    if world.size == 1:
        return [text]
    data = text.encode()
    sizes = gather_numbers([len(data)], world=world)[:, 0].astype(int).tolist()
    local = torch.zeros(max(1, *sizes), dtype=torch.uint8)
    local[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else local[:0]
    gathered = torch.empty((world.size, len(local)), dtype=torch.uint8)
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    gather(gathered.view(-1), local)
    return [
        row[:size].numpy().tobytes().decode() for row, size in zip(gathered, sizes, strict=True)
    ]


def barrier() -> None:
    """Wait for every rank."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()
