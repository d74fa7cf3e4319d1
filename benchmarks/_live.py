"""Measure the bytes of tensors that live at once: `with LiveBytes() as live:` around any work.

Every operator's results are seen as they are made, and every storage until it is freed, so what
autograd, a checkpoint or a cache holds counts, whoever holds it. What lived before does not count.
Scratch memory within one operator is not seen.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Attributes: `now` and `peak`, in bytes, of storages made since this was entered."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: dict[int, weakref.finalize] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator; note the storages of its results that are none of its arguments'."""
        given = {_address(each) for each in _tensors((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            if _address(tensor) not in given:
                self._note(tensor.untyped_storage())
        return result

    def leave_out(self, tensor: torch.Tensor) -> None:
        """Count a tensor's storage no longer."""
        storage = tensor.untyped_storage()
        if storage._cdata in self._known:
            self._known[storage._cdata]()

    def _note(self, storage: torch.UntypedStorage) -> None:
        address, num_bytes = storage._cdata, storage.nbytes()
        if address in self._known:
            return
        self.now += num_bytes
        self.peak = max(self.peak, self.now)
        self._known[address] = weakref.finalize(storage, self._drop, address, num_bytes)

    def _drop(self, address: int, num_bytes: int) -> None:
        del self._known[address]
        self.now -= num_bytes


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [each for each in tree_leaves(tree) if type(each) in (torch.Tensor, torch.nn.Parameter)]


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
