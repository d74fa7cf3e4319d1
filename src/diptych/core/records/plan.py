"""Records of where a run can run: devices, and what layouts on them are predicted to cost."""

from __future__ import annotations

from typing import Literal

from diptych.core.records.base import Record
from diptych.core.records.layout import Layout


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


class HeldBytes(Record):
    """What one rank holds throughout a run, of each kind, each engine's padding included."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.parameters + self.gradients + self.optimizer


class Prediction(Record):
    """A layout with its predicted cost on the first rank.

    `held_bytes` is what it holds throughout, wherever it lies; `peak_bytes` the most on the device;
    `host_bytes` the most that it offloads to the host's memory beside a GPU's. `refused` says why
    it cannot run.
    """

    layout: Layout
    held_bytes: int
    peak_bytes: int
    host_bytes: int = 0
    step_s: float | None
    refused: str | None = None


class Plan(Record):
    """`plan`: layouts, best first, then the refused ones with the reason.

    `checkpoint_bytes` are those of a checkpoint's tensors, on any layout. `asked` has the settings
    of `plan.layout` that were not left as they are by default, each with its value; None in a plan
    of a release that did not note them.
    """

    cluster: Cluster
    global_batch: int
    predictions: tuple[Prediction, ...]
    checkpoint_bytes: int | None = None
    asked: tuple[str, ...] | None = None

    @property
    def best(self) -> Layout:
        """Return the layout to run."""
        return self.predictions[0].layout
