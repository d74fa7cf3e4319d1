"""Held-out loss: fixed micro-batches in, nats per label token over all ranks out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from diptych.data.collate import MicroBatch
from diptych.parallel.engine import Engine
from diptych.parallel.mesh import World, gather_numbers
from diptych.train.step import forward


@dataclass(frozen=True)
class HeldoutLoss:
    """Nats per label token of the held-out samples, whole and by source; None: no such token."""

    mean: float | None
    by_source: tuple[float | None, ...]


def measure_heldout_loss(
    batches: Sequence[MicroBatch],
    *,
    engine: Engine,
    world: World,
    num_sources: int,
    place: Callable[[MicroBatch], MicroBatch] = lambda batch: batch,
) -> HeldoutLoss:
    """Measure the mean loss over all ranks' held-out label tokens.

    `place` puts a micro-batch where the model is. Every rank has the same number of micro-batches,
    so every rank reaches every collective.
    """
    loss_sums = np.zeros(1 + num_sources)
    num_tokens = np.zeros(1 + num_sources)
    engine.module.eval()
    with torch.no_grad():
        for batch in batches:
            loss, by_source = forward(engine, batch=place(batch))
            loss_sums += [float(loss), *by_source.tolist()]
            num_tokens += [batch.num_label_tokens, *batch.num_label_tokens_by_source]
    engine.module.train()
    shares = gather_numbers([*loss_sums, *num_tokens], world=world).sum(axis=0)
    sums, counts = np.split(shares, 2)
    means = [float(total / n) if n else None for total, n in zip(sums, counts, strict=True)]
    return HeldoutLoss(mean=means[0], by_source=tuple(means[1:]))
