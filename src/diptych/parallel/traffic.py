"""Count what a rank sends at collectives: `with count_traffic() as traffic:` around any code.

In: the calls that torch.distributed makes meanwhile, whoever makes them (DDP's reducer, FSDP2,
DeepSpeed, a DTensor, our own loop). Out: calls by kind, group size and dtype, with their bytes.
It knows no engine and no model, and costs nothing where it is not used.

A call's bytes are those of the ring algorithm, a mean over the group: what a library really sends
can differ (trees, switches that add up), the number of bytes that have to travel does not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

Kind = Literal[
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "all_to_all",
    "send",
]


@dataclass(frozen=True)
class Call:
    """One collective.

    Attributes:
        kind: which.
        group_size: ranks that take part.
        dtype: as torch names it, such as 'float32'.
        payload_bytes: of the whole tensor: what is reduced or broadcast, or all ranks' parts.
    """

    kind: Kind
    group_size: int
    dtype: str
    payload_bytes: int

    @property
    def sent_bytes(self) -> float:
        """What a rank sends, by the ring algorithm: a mean where ranks differ (broadcast)."""
        if self.kind == "send":
            return self.payload_bytes
        passes = 2 if self.kind == "all_reduce" else 1
        return passes * (self.group_size - 1) / self.group_size * self.payload_bytes


@dataclass
class Traffic:
    """The calls of a rank, in their order."""

    calls: list[Call] = field(default_factory=list)

    @property
    def payload_bytes(self) -> int:
        """Add up the tensors."""
        return sum(call.payload_bytes for call in self.calls)

    @property
    def sent_bytes(self) -> float:
        """Add up what this rank sent."""
        return sum(call.sent_bytes for call in self.calls)

    def larger_than(self, num_bytes: int) -> Traffic:
        """Leave out small payloads: a gradient's norm, the numbers that the loop exchanges."""
        return Traffic([call for call in self.calls if call.payload_bytes > num_bytes])

    def by(self, *fields: Literal["kind", "group_size", "dtype"]) -> dict[tuple[Any, ...], float]:
        """Add up the bytes sent by the fields that are named."""
        sums: dict[tuple[Any, ...], float] = defaultdict(float)
        for call in self.calls:
            sums[tuple(getattr(call, name) for name in fields)] += call.sent_bytes
        return dict(sums)


@contextmanager
def count_traffic() -> Iterator[Traffic]:
    """Count the collectives that this thread, or a backward pass that it starts, calls.

    And what other threads reduce meanwhile: hooks of gradients go on in the backend's threads.
    """
    traffic = Traffic()
    mode = _Counting(traffic)
    reduce = dist.ProcessGroup.allreduce

    def reduce_counted(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        if mode in _get_current_dispatch_mode_stack():
            return reduce(group, *args, **kwargs)
        with _Counting(traffic):
            return reduce(group, *args, **kwargs)

    with patch.object(dist.ProcessGroup, "allreduce", reduce_counted), mode:
        yield traffic


class _Counting(TorchDispatchMode):
    """Sees collectives as operators, so also those that C++ calls (DDP's reducer)."""

    def __init__(self, traffic: Traffic) -> None:
        super().__init__()
        self._traffic = traffic

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            # A DTensor turns into plain collectives, which come here again.
            return NotImplemented
        place = _PLACES.get(str(getattr(func, "_overloadpacket", "")))
        if place is not None:
            self._traffic.calls.extend(_calls(place, args))
        return func(*args, **(kwargs or {}))


def _calls(place: _Place, args: tuple[Any, ...]) -> Iterator[Call]:
    """Describe a call, once for each dtype in it."""
    size = _size(args[place.group])
    sums: dict[torch.dtype, int] = defaultdict(int)
    for tensor in _flat(args[place.tensors]):
        sums[tensor.dtype] += tensor.numel() * tensor.element_size()
    for dtype, num_bytes in sums.items():
        name = str(dtype).removeprefix("torch.")
        yield Call(place.kind, size, name, num_bytes * (1 if place.whole else size))


def _flat(found: Any) -> Iterator[torch.Tensor]:
    if isinstance(found, torch.Tensor):
        yield found
    else:
        for part in found:
            yield from _flat(part)


def _size(group: Any) -> int:
    if isinstance(group, str):
        group = distributed_c10d._resolve_process_group(group)  # pyright: ignore
    elif isinstance(group, torch.ScriptObject):
        group = dist.ProcessGroup.unbox(group)
    return group.size()


class _Place(NamedTuple):
    """Where an operator has its tensors and its group.

    Attributes:
        kind: of collective.
        tensors: the place of the tensors among its arguments.
        group: the place of the group, or of its name.
        whole: whether the tensors are the payload, or this rank's part of it.
    """

    kind: Kind
    tensors: int
    group: int
    whole: bool


_PLACES: dict[str, _Place] = {
    "c10d.allreduce_": _Place("all_reduce", 0, 1, whole=True),
    "c10d.allreduce_coalesced_": _Place("all_reduce", 0, 1, whole=True),
    "c10d._allgather_base_": _Place("all_gather", 0, 2, whole=True),
    "c10d.allgather_": _Place("all_gather", 0, 2, whole=True),
    "c10d.allgather_coalesced_": _Place("all_gather", 1, 2, whole=False),
    "c10d.allgather_into_tensor_coalesced_": _Place("all_gather", 0, 2, whole=True),
    "c10d._reduce_scatter_base_": _Place("reduce_scatter", 1, 2, whole=True),
    "c10d.reduce_scatter_": _Place("reduce_scatter", 1, 2, whole=True),
    "c10d.reduce_scatter_tensor_coalesced_": _Place("reduce_scatter", 1, 2, whole=True),
    "c10d.broadcast_": _Place("broadcast", 0, 1, whole=True),
    "c10d.reduce_": _Place("reduce", 0, 1, whole=True),
    "c10d.gather_": _Place("gather", 1, 2, whole=False),
    "c10d.gather_into_tensor_": _Place("gather", 1, 2, whole=False),
    "c10d.scatter_": _Place("scatter", 0, 2, whole=False),
    "c10d.alltoall_": _Place("all_to_all", 1, 2, whole=True),
    "c10d.alltoall_base_": _Place("all_to_all", 1, 2, whole=True),
    "c10d.send": _Place("send", 0, 1, whole=True),
    "_c10d_functional.all_reduce": _Place("all_reduce", 0, 2, whole=True),
    "_c10d_functional.all_reduce_": _Place("all_reduce", 0, 2, whole=True),
    "_c10d_functional.all_reduce_coalesced": _Place("all_reduce", 0, 2, whole=True),
    "_c10d_functional.all_reduce_coalesced_": _Place("all_reduce", 0, 2, whole=True),
    "_c10d_functional.all_gather_into_tensor": _Place("all_gather", 0, 2, whole=False),
    "_c10d_functional.all_gather_into_tensor_out": _Place("all_gather", 0, 2, whole=False),
    "_c10d_functional.all_gather_into_tensor_coalesced": _Place("all_gather", 0, 2, whole=False),
    "_c10d_functional.reduce_scatter_tensor": _Place("reduce_scatter", 0, 3, whole=True),
    "_c10d_functional.reduce_scatter_tensor_out": _Place("reduce_scatter", 0, 3, whole=True),
    "_c10d_functional.reduce_scatter_tensor_coalesced": _Place("reduce_scatter", 0, 3, whole=True),
    "_c10d_functional.broadcast": _Place("broadcast", 0, 2, whole=True),
    "_c10d_functional.broadcast_": _Place("broadcast", 0, 2, whole=True),
    "_c10d_functional.all_to_all_single": _Place("all_to_all", 0, 3, whole=True),
}
"""By operator. Barriers carry nothing; a receive is somebody's send."""
