"""Records of where a run can run: devices, layouts, their predicted cost."""

from __future__ import annotations

from typing import Literal

from diptych.core.records.base import Record


class Device(Record):
    """One kind of device as numbers; what is not known is None."""

    kind: Literal["cpu", "cuda"]
    name: str
    memory_bytes: int
    flops_per_s: dict[str, float]
    memory_bytes_per_s: float | None = None


class Cluster(Record):
    """`cluster`: devices and links as numbers."""

    num_nodes: int
    num_devices_per_node: int
    device: Device
    num_cores_per_node: int
    host_memory_bytes: int
    link_bytes_per_s: float | None = None

    @property
    def num_devices(self) -> int:
        """Count the devices of all nodes."""
        return self.num_nodes * self.num_devices_per_node


class Layout(Record):
    """How a run is spread. World size is the product of the axes; only dp and shard are built."""

    engine: Literal["ddp", "fsdp2"] = "ddp"
    dp: int = 1
    shard: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    micro_batch: int = 1
    precision: Literal["fp32", "bf16"] = "fp32"
    device: Literal["cpu", "cuda"] = "cpu"
    grad_sync: Literal["last", "every"] = "last"

    @property
    def world_size(self) -> int:
        """Count the ranks."""
        return self.dp * self.shard * self.tp * self.pp * self.cp


class Prediction(Record):
    """A layout with its predicted cost; `refused` says why it cannot run."""

    layout: Layout
    held_bytes: int
    peak_bytes: int
    step_s: float | None
    refused: str | None = None


class Plan(Record):
    """`plan`: layouts, best first, then the refused ones with the reason."""

    cluster: Cluster
    global_batch: int
    predictions: tuple[Prediction, ...]

    @property
    def best(self) -> Layout:
        """Return the layout to run."""
        return self.predictions[0].layout
