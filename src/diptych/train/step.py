"""One optimizer step: a global batch's micro-batches in, a summed loss and new weights out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

from diptych.core.axes import IGNORED_LABEL
from diptych.core.records import ContrastSpec, MemoryOptions
from diptych.data.collate import MicroBatch
from diptych.model.attention.kernels import seen_by
from diptych.model.contrast import Contrast
from diptych.model.families import family_name, mask_rule, torch_side
from diptych.model.loss import make_losses
from diptych.parallel.engine import Engine, Update
from diptych.parallel.phases import Phases


class LossModule(nn.Module):
    """A Hugging Face image-text model that returns its summed loss, whole and by source.

    The head runs on label positions alone, so logits are [L, V] and never [B, S, V]. Rows are
    right-padded and no token looks past its own image, so no real token sees padding; a mask is
    needed where a row holds several samples, or where a family's layers see otherwise. Labels are
    smoothed, and images contrasted, in training and never in evaluation.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        num_sources: int = 1,
        options: MemoryOptions = MemoryOptions(),  # noqa: B008 - frozen
        label_smoothing: float = 0.0,
        contrast: ContrastSpec | None = None,
    ) -> None:
        super().__init__()
        self._label_smoothing = label_smoothing
        self.model = model
        self.num_sources = num_sources
        self._side, self._rule = torch_side(family_name(model)), mask_rule(model)
        self._contrast = None if contrast is None else Contrast(model, spec=contrast)
        self._makes_losses = options.loss != "whole"
        make_losses(model.lm_head, options=options, label_smoothing=label_smoothing)

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
        labels_per_pair: float = 0.0,
    ) -> tuple[torch.Tensor, ...]:
        """Sum the cross-entropy over label tokens.

        Args:
            input_ids: [B, S] int64.
            labels: [B, S] int64, aligned with input_ids; -100 where a token carries no loss.
            position_ids: [3, B, S] int64.
            pixel_values: [P, D] float32, every image's patches or tiles.
            grid_thw: [I, 3] int64.
            source_ids: [B, S] int16, the source of each token's sample.
            segment_ids: [B, S] int32, which sample of its row a token is in; None: one a row.
            labels_per_pair: label tokens of the global batch, by its samples with image and labels:
                so much a contrasted sample counts where a label token counts 1.

        Returns:
            [] float32, the sum (not the mean) in nats, and [number of sources] float32, the same
            by source and without gradient. Where images are contrasted, the first has the weighted
            contrastive loss in it, and a third, [2] float32, the sums of both without gradient.
        """
        body: nn.Module = self.model.model
        seen = seen_by(
            self.model, rule=self._rule, input_ids_BS=input_ids, segment_ids_BS=segment_ids
        )
        inputs = self._side.inputs(
            input_ids_BS=input_ids,
            position_ids_3BS=position_ids,
            pixel_values_PD=pixel_values,
            grid_thw_I3=grid_thw,
            mask_B1SS=seen.mask,
        )
        hidden_BSD = body(**inputs, **seen.keywords, use_cache=False).last_hidden_state
        targets_BS = labels[:, 1:]
        chosen_BS = targets_BS != IGNORED_LABEL
        total, losses_L = self._losses(
            hidden_BSD[:, :-1][chosen_BS], targets_L=targets_BS[chosen_BS]
        )
        by_source = self._by_source(losses_L.detach(), sources_L=source_ids[:, 1:][chosen_BS])
        if self._contrast is None or not self.training:
            return total, by_source
        vision = self._contrast.loss(
            input_ids_BS=input_ids, labels_BS=labels, segment_ids_BS=segment_ids
        )
        whole = total + self._contrast.weight * labels_per_pair * vision
        return whole, by_source, torch.stack([total.detach(), vision.detach()])

    def _losses(
        self, hidden_LD: torch.Tensor, *, targets_L: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        head: nn.Module = self.model.lm_head
        if self._makes_losses:
            return head(hidden_LD, targets_L=targets_L)
        logits_LV = head(hidden_LD)
        if logits_LV.dtype in (torch.bfloat16, torch.float16):
            logits_LV = logits_LV.float()
        losses_L = functional.cross_entropy(
            logits_LV,
            targets_L,
            reduction="none",
            label_smoothing=self._label_smoothing if self.training else 0.0,
        )
        return losses_L.sum(), losses_L

    def _by_source(self, losses_L: torch.Tensor, *, sources_L: torch.Tensor) -> torch.Tensor:
        if self.num_sources == 1:
            return losses_L.sum()[None]
        # A product instead of a scatter: atomic additions on a GPU have no fixed order.
        sources_C = torch.arange(self.num_sources, device=losses_L.device)
        return (sources_L[None, :] == sources_C[:, None]).to(losses_L.dtype) @ losses_L


@dataclass(frozen=True)
class StepResult:
    """What a rank knows after a step: its share of the summed loss, and what the engine did.

    `loss_sums` is the same share by source, `vision_sum` that of the contrastive loss, where there
    is one.
    """

    loss_sum: float
    loss_sums: tuple[float, ...]
    update: Update
    vision_sum: float | None = None


def run_step(
    micro_batches: Sequence[MicroBatch],
    *,
    engine: Engine,
    num_label_tokens: int,
    num_paired: int = 0,
    lr: float,
    max_grad_norm: float,
    place: Callable[[MicroBatch], MicroBatch] = lambda batch: batch,
    phases: Phases | None = None,
) -> StepResult:
    """Accumulate gradients over micro-batches, clip, update.

    Args:
        micro_batches: This rank's share of the global batch; as many on every rank.
        engine: The spread module and its optimizer.
        num_label_tokens: Of the whole global batch: the loss is a mean over those, however the rows
            lie on ranks and micro-batches.
        num_paired: Samples of the whole global batch that have an image and labels: a contrastive
            loss is a mean over those.
        lr: This step's learning rate.
        max_grad_norm: Clip at this global L2 norm.
        place: Puts a micro-batch where the model is, when it is its turn.
        phases: Is told what this rank does when.
    """
    phases = phases or Phases(torch.device("cpu"))
    weight = 1.0 / max(1, num_label_tokens)
    per_pair = labels_per_pair(num_label_tokens, num_paired=num_paired)
    totals: torch.Tensor | None = None
    is_contrasted = False
    waits = partial(phases.turn, "communication")
    for number, batch in enumerate(micro_batches, start=1):
        with engine.micro_batch(is_last=number == len(micro_batches)):
            with phases.of("place"):
                placed = place(batch)
            with phases.of("forward"):
                loss, by_source, *both = forward(engine, batch=placed, labels_per_pair=per_pair)
            with phases.of("backward"):
                engine.backward(loss, weight=weight, computed=waits)
        is_contrasted = bool(both)
        found = torch.cat([*(both or [loss.detach()[None]]), by_source])
        totals = found if totals is None else totals + found
    with phases.of("update"):
        update = engine.update(lr=lr, max_grad_norm=max_grad_norm)
    assert totals is not None, "a step has at least one micro-batch"
    loss_sum, *loss_sums = totals.tolist()
    vision_sum = loss_sums.pop(0) if is_contrasted else None
    return StepResult(loss_sum, tuple(loss_sums), update, vision_sum)


def labels_per_pair(num_label_tokens: int, *, num_paired: int) -> float:
    """Return how much a contrasted sample counts where a label token counts 1.

    The engine then divides the sum of both losses by the label tokens, whatever it is of.
    """
    return max(1, num_label_tokens) / max(1, num_paired)


def forward(
    engine: Engine, *, batch: MicroBatch, labels_per_pair: float = 0.0
) -> tuple[torch.Tensor, ...]:
    """Compute the summed loss of one micro-batch; see `LossModule.forward`."""
    with engine.autocast():
        return engine.module(
            input_ids=batch.input_ids_BS,
            labels=batch.labels_BS,
            position_ids=batch.position_ids_3BS,
            pixel_values=batch.pixel_values_PD,
            grid_thw=batch.grid_thw_I3,
            source_ids=batch.source_ids_BS,
            segment_ids=batch.segment_ids_BS,
            labels_per_pair=labels_per_pair,
        )
