"""Where a micro-batch lies on the device: new tensors every time, or the same ones again.

In: micro-batches in the host's memory, one at a time, each placed after the backward pass of the
one before. Out: the same on the device. With reused buffers a shape is allocated once, so that
memory neither moves nor falls apart; a buffer belongs to the newest micro-batch of its shape.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable

import torch

from diptych.data.collate import MicroBatch

_LOG = logging.getLogger(__name__)
_MAX_SHAPES = 8

Place = Callable[[MicroBatch], MicroBatch]
"""Puts a micro-batch on the device. What it returned before may be overwritten."""


def place_on(device: torch.device, *, reuse: bool) -> Place:
    """Return what puts micro-batches on a device, in buffers that are used again or not."""
    return InputBuffers(device).place if reuse else lambda batch: batch.to(device)


class InputBuffers:
    """One tensor on the device for each field and shape, as long as there are few shapes.

    Autograd may hold a buffer until its backward pass, which ends before the next micro-batch is
    placed. A graph that is kept longer notices: torch raises when a tensor that was saved for
    backward has been written to.
    """

    def __init__(self, device: torch.device, *, max_shapes: int = _MAX_SHAPES) -> None:
        self._device = device
        self._max_shapes = max_shapes
        self._buffers: dict[str, OrderedDict[tuple[torch.Size, torch.dtype], torch.Tensor]] = {}
        self._has_said = False
        self.num_allocated = 0

    def place(self, batch: MicroBatch) -> MicroBatch:
        """Copy a micro-batch into the buffers of its shapes.

        The copy runs in the order of the device's stream: behind what still reads the buffer, and
        from page-locked memory without making the host wait.
        """
        return batch.change(self._copy)

    @property
    def num_buffers(self) -> int:
        """Count the buffers that are held."""
        return sum(map(len, self._buffers.values()))

    def _copy(self, field: str, tensor: torch.Tensor) -> torch.Tensor:
        known = self._buffers.setdefault(field, OrderedDict())
        key = (tensor.shape, tensor.dtype)
        buffer = known.get(key)
        if buffer is None:
            buffer = known[key] = torch.empty_like(tensor, device=self._device)
            self.num_allocated += 1
        known.move_to_end(key)
        if len(known) > self._max_shapes:
            known.popitem(last=False)
            self._say(field)
        return buffer.copy_(tensor, non_blocking=True)

    def _say(self, field: str) -> None:
        if not self._has_said:
            self._has_said = True
            _LOG.warning(
                "%s has more than %d shapes, so buffers are allocated anew; pad to fewer: "
                "memory.token_multiple, patch_multiple",
                field,
                self._max_shapes,
            )
