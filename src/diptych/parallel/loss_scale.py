"""fp16's dynamic loss scale: whether steps were finite flows in, the next step's scale flows out.

Every rank sees the same steps, so every rank holds the same scale without a collective.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from diptych.core.records import LossScale

_MOST = torch.finfo(torch.float32).max


class LossScaler:
    """Grows after so many finite steps in a row, shrinks after one that was not.

    Source: Micikevicius et al., Mixed Precision Training, section 3.2; `torch.amp.GradScaler`.
    Differs: never below its minimum; its state is numbers, which a checkpoint keeps as JSON.
    """

    def __init__(self, options: LossScale) -> None:
        self._options = options
        self.scale = options.initial
        self._num_finite = 0

    def observe(self, is_finite: bool) -> bool:
        """Take note of a step; return whether a skipped one left room to shrink."""
        options = self._options
        if not is_finite:
            self._num_finite = 0
            before, self.scale = self.scale, max(options.minimum, self.scale * options.backoff)
            return self.scale < before
        self._num_finite += 1
        if self._num_finite == options.growth_interval:
            self._num_finite = 0
            grown = self.scale * options.growth
            # The loss is fp32: a scale that it cannot hold would skip a step for nothing.
            self.scale = grown if grown <= _MOST else self.scale
        return False

    def state(self) -> dict[str, Any]:
        """Return the scale and how many finite steps it has seen."""
        return {"scale": self.scale, "num_finite": self._num_finite}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned."""
        self.scale = max(self._options.minimum, float(state["scale"]))
        self._num_finite = int(state["num_finite"])
