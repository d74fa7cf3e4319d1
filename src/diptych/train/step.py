"""One optimizer step: a global batch's micro-batches in, a summed loss and new weights out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

from diptych.core.axes import IGNORED_LABEL
from diptych.data.collate import MicroBatch
from diptych.model.attention import mask_segments
from diptych.parallel.engine import Engine, clip_gradients


class LossModule(nn.Module):
    """A Hugging Face image-text model that returns its summed loss, whole and by source.

    The head runs on label positions alone, so logits are [L, V] and never [B, S, V]. Rows are
    right-padded and attention is causal, so no real token sees padding; a mask is needed only
    where a row holds several samples.
    """

    def __init__(self, model: PreTrainedModel, *, num_sources: int = 1) -> None:
        super().__init__()
        self.model = model
        self.num_sources = num_sources

    def forward(
        self,
        *,
        input_ids: torch.Tensor,
        labels: torch.Tensor,
        position_ids: torch.Tensor,
        pixel_values: torch.Tensor,
        grid_thw: torch.Tensor,
        source_ids: torch.Tensor,
        segment_ids: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum the cross-entropy over label tokens.

        Args:
            input_ids: [B, S] int64.
            labels: [B, S] int64, aligned with input_ids; -100 where a token carries no loss.
            position_ids: [3, B, S] int64.
            pixel_values: [P, D] float32, every image's patches.
            grid_thw: [I, 3] int64.
            source_ids: [B, S] int16, the source of each token's sample.
            segment_ids: [B, S] int32, which sample of its row a token is in; None: one a row.

        Returns:
            [] float32, the sum (not the mean) in nats, and [number of sources] float32, the same
            by source and without gradient.
        """
        body: nn.Module = self.model.model
        hidden_BSD = body(
            input_ids=input_ids,
            attention_mask=None if segment_ids is None else mask_segments(segment_ids),
            position_ids=position_ids,
            pixel_values=pixel_values,
            image_grid_thw=grid_thw,
            use_cache=False,
        ).last_hidden_state
        targets_BS = labels[:, 1:]
        chosen_BS = targets_BS != IGNORED_LABEL
        head: nn.Module = self.model.lm_head
        logits_LV = head(hidden_BSD[:, :-1][chosen_BS])
        if logits_LV.dtype in (torch.bfloat16, torch.float16):
            logits_LV = logits_LV.float()
        losses_L = functional.cross_entropy(logits_LV, targets_BS[chosen_BS], reduction="none")
        total = losses_L.sum()
        return total, self._by_source(losses_L.detach(), sources_L=source_ids[:, 1:][chosen_BS])

    def _by_source(self, losses_L: torch.Tensor, *, sources_L: torch.Tensor) -> torch.Tensor:
        if self.num_sources == 1:
            return losses_L.sum()[None]
        # A product instead of a scatter: atomic additions on a GPU have no fixed order.
        sources_C = torch.arange(self.num_sources, device=losses_L.device)
        return (sources_L[None, :] == sources_C[:, None]).to(losses_L.dtype) @ losses_L


@dataclass(frozen=True)
class StepResult:
    """What a rank knows after a step: its share of the summed loss, the global gradient norm.

    `loss_sums` is the same share by source.
    """

    loss_sum: float
    loss_sums: tuple[float, ...]
    grad_norm: float
    applied: bool


def run_step(
    micro_batches: Sequence[MicroBatch],
    *,
    engine: Engine,
    optimizer: torch.optim.Optimizer,
    num_label_tokens: int,
    max_grad_norm: float,
) -> StepResult:
    """Accumulate gradients over micro-batches, clip, update.

    Args:
        micro_batches: This rank's share of the global batch; as many on every rank.
        engine: The spread module.
        optimizer: Its gradients are set to None at the end.
        num_label_tokens: Of the whole global batch: the loss is a mean over those, however the rows
            lie on ranks and micro-batches.
        max_grad_norm: Clip at this global L2 norm.

    Returns:
        The result; `applied` is False when the gradient was not finite, and no weight has changed.
    """
    scale = engine.gradient_scale / max(1, num_label_tokens)
    totals: torch.Tensor | None = None
    for number, batch in enumerate(micro_batches, start=1):
        with engine.accumulate(number == len(micro_batches)):
            loss, by_source = forward(engine, batch=batch)
            (loss * scale).backward()
        found = torch.cat([loss.detach()[None], by_source])
        totals = found if totals is None else totals + found
    grad_norm = clip_gradients(engine.parameters, max_norm=max_grad_norm)
    assert totals is not None, "a step has at least one micro-batch"
    loss_sum, *loss_sums = totals.tolist()
    applied = math.isfinite(grad_norm)
    if applied:
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return StepResult(loss_sum, tuple(loss_sums), grad_norm, applied)


def forward(engine: Engine, *, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the summed loss of one micro-batch, whole and by source."""
    with engine.autocast():
        return engine.module(
            input_ids=batch.input_ids_BS,
            labels=batch.labels_BS,
            position_ids=batch.position_ids_3BS,
            pixel_values=batch.pixel_values_PD,
            grid_thw=batch.grid_thw_I3,
            source_ids=batch.source_ids_BS,
            segment_ids=batch.segment_ids_BS,
        )
