"""Muon for the matrices of blocks and AdamW for the rest, as one optimizer.

In: groups of both kinds. Out: an optimizer whose groups and states are theirs. Both are torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, final

import torch
from torch.distributed.tensor import DTensor

from diptych.core.errors import LayoutError
from diptych.core.records import OptimizerSpec


@final
class MuonAndAdamW(torch.optim.Optimizer):
    """Updates each group by its own algorithm.

    Muon's steps are scaled so that their mean square is AdamW's: one rate and one decay serve both.

    Source: Liu et al., Muon is Scalable for LLM Training, section 2.2 (`match_rms_adamw`).
    """

    def __init__(
        self,
        *,
        matrices: Sequence[dict[str, Any]],
        rest: Sequence[dict[str, Any]],
        spec: OptimizerSpec,
    ) -> None:
        """Make both.

        Raises:
            LayoutError: a matrix is sharded; its update needs the whole gradient.
        """
        _check_whole(matrices)
        self._both: list[torch.optim.Optimizer] = []
        if matrices:
            self._both.append(_muon(matrices, spec=spec))
        if rest:
            self._both.append(_adamw(rest, spec=spec))
        super().__init__([group for each in self._both for group in each.param_groups], defaults={})
        # One list and one mapping: what is set or loaded here, they read.
        self.param_groups = [group for each in self._both for group in each.param_groups]
        for each in self._both:
            each.state = self.state

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every weight that has a gradient."""
        assert closure is None, "a step is taken with the gradient that is there"
        for each in self._both:
            each.step()


def _muon(groups: Sequence[dict[str, Any]], *, spec: OptimizerSpec) -> torch.optim.Muon:
    return torch.optim.Muon(
        [{**group, "moments": ("momentum_buffer",)} for group in groups],
        lr=spec.lr,
        momentum=spec.momentum,
        adjust_lr_fn="match_rms_adamw",
    )


def _adamw(groups: Sequence[dict[str, Any]], *, spec: OptimizerSpec) -> torch.optim.AdamW:
    return torch.optim.AdamW(list(groups), lr=spec.lr, betas=spec.betas, eps=spec.eps, fused=True)


def _check_whole(groups: Sequence[dict[str, Any]]) -> None:
    parameters = chain.from_iterable(group["params"] for group in groups)
    if any(isinstance(each, DTensor) for each in parameters):
        raise LayoutError(
            "train.optimizer.kind is muon, and this layout shards the matrices",
            allowed="Muon's update of a matrix needs its whole gradient: engine ddp",
            cure="Set plan.layout.engine to ddp, or train.optimizer.kind to adamw",
        )
