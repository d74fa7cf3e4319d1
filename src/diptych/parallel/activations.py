"""Keep what autograd saves in the host's memory: copied there in forward, back in backward.

In: a module that returns a loss. Out: its forward, changed in place. Weights stay where they are,
so that what gathers and frees them goes on as before. On a CPU the copies go from host to host:
nothing is saved by it, but the same code runs.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from diptych.core.records import Layout

MIN_ELEMENTS = 1024
"""Of a tensor that is worth a copy."""
_NUM_IN_FLIGHT = 4


def apply(module: nn.Module, *, layout: Layout) -> None:
    """Have a module's forward offload what it saves, where the layout says so, while it trains."""
    if not layout.memory.offload_activations:
        return
    forward = module.forward
    kind = layout.device

    @wraps(forward)
    def offloading(*args: Any, **kwargs: Any) -> Any:
        if not (module.training and torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        offload = _Offload(kind)
        with torch.autograd.graph.saved_tensors_hooks(offload.pack, offload.unpack):
            result = forward(*args, **kwargs)
        offload.settle()
        return result

    module.forward = offloading


@dataclass
class _Copy:
    """A storage in the host's memory, and on the device again while it is being used.

    Attributes:
        host: [bytes] uint8.
        device: where it came from.
        num_users: saved tensors that have not been asked for yet.
    """

    host: torch.Tensor
    device: torch.device
    num_users: int = 0
    back: torch.UntypedStorage | None = None

    def fetch(self) -> torch.UntypedStorage:
        """Return the storage on its device; the last user lets it go."""
        # On the stream that uses it: it waits for the copy, and memory is freed in order.
        storage = (
            self.back or self.host.to(self.device, non_blocking=True, copy=True).untyped_storage()
        )
        self.num_users -= 1
        self.back = storage if self.num_users > 0 else None
        return storage


@dataclass(frozen=True)
class _Saved:
    """A tensor over a copied storage."""

    copy: _Copy
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass
class _Offload:
    """The saved tensors of one forward pass.

    One storage is copied once, however many tensors over it are saved, unless it was written to in
    between.
    """

    kind: str
    _copies: dict[tuple[int, int], tuple[StorageWeakRef, _Copy]] = field(default_factory=dict)
    _in_flight: deque[tuple[Any, torch.Tensor]] = field(default_factory=deque)

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | _Saved:
        """Copy a saved tensor to the host, if it is to go there."""
        if _is_weight(tensor):
            return tensor
        if not self._goes(tensor):
            # As it is, a result would keep itself alive: its node holds it, and it holds its node.
            return tensor.detach()
        storage = tensor.untyped_storage()
        key = (storage._cdata, tensor._version)
        # While the weak reference lives, no other storage can have its address.
        reference, copy = self._copies.get(key, (None, None))
        if reference is None or copy is None or reference.expired():
            copy = _Copy(self._to_host(tensor), device=tensor.device)
            self._copies[key] = (StorageWeakRef(storage), copy)
        copy.num_users += 1
        offset = int(tensor.storage_offset())
        return _Saved(copy, tensor.dtype, tensor.size(), tensor.stride(), offset)

    def unpack(self, saved: torch.Tensor | _Saved) -> torch.Tensor:
        """Bring a saved tensor back."""
        if isinstance(saved, torch.Tensor):
            return saved
        storage = saved.copy.fetch()
        empty = torch.empty(0, dtype=saved.dtype, device=saved.copy.device)
        return empty.set_(storage, saved.offset, saved.size, saved.stride)

    def settle(self) -> None:
        """Have the stream of the pass wait for the copies that are under way."""
        self._copies.clear()
        while self._in_flight:
            self._land()

    def _goes(self, tensor: torch.Tensor) -> bool:
        return (
            tensor.device.type == self.kind
            and tensor.numel() >= MIN_ELEMENTS
            and type(tensor) is torch.Tensor
            and tensor.layout == torch.strided
        )

    def _to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        source = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        source.set_(tensor.untyped_storage())
        if self.kind != "cuda":
            return source.clone()
        host = torch.empty(source.shape, dtype=torch.uint8, pin_memory=True)
        side = _side_stream(tensor.device)
        side.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(side):
            host.copy_(source, non_blocking=True)
        # The pass may free the source only when its own stream has waited for the copy.
        self._in_flight.append((side.record_event(), source))
        if len(self._in_flight) > _NUM_IN_FLIGHT:
            self._land()
        return host

    def _land(self) -> None:
        copied, source = self._in_flight.popleft()
        torch.cuda.current_stream(source.device).wait_event(copied)


def _is_weight(tensor: torch.Tensor) -> bool:
    """Say whether a tensor is a parameter, a view of one, or one that autocast has cast."""
    whole = tensor if tensor._base is None else tensor._base
    if isinstance(whole, nn.Parameter):
        return True
    node = whole.grad_fn
    if node is None or not node.name().startswith("ToCopyBackward"):
        return False
    source = node.next_functions[0][0]
    return source is not None and source.name() == "torch::autograd::AccumulateGrad"


_SIDE_STREAMS: dict[torch.device, torch.cuda.Stream] = {}


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return _SIDE_STREAMS.setdefault(device, torch.cuda.Stream(device))
