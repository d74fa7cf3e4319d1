"""Held-out loss: fixed micro-batches in, nats per label token over all ranks out."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from diptych.data.collate import MicroBatch
from diptych.parallel.engine import Engine
from diptych.parallel.mesh import World, gather_numbers
from diptych.train.step import forward


def measure_heldout_loss(
    batches: Sequence[MicroBatch], *, engine: Engine, world: World
) -> float | None:
    """Measure the mean loss over all ranks' held-out label tokens; None where there are none.

    Every rank has the same number of micro-batches, so every rank reaches every collective.
    """
    loss_sum = 0.0
    num_label_tokens = 0
    engine.module.eval()
    with torch.no_grad():
        for batch in batches:
            loss_sum += float(forward(engine, batch=batch))
            num_label_tokens += batch.num_label_tokens
    engine.module.train()
    totals = gather_numbers([loss_sum, num_label_tokens], world=world).sum(axis=0)
    return float(totals[0] / totals[1]) if totals[1] else None
