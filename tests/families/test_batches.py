"""Batches of several images, of one and of none, padded to few shapes: every family's loss stays.

Expected losses are those of transformers' own forward pass, one conversation at a time.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from diptych.data.batcher import Batcher
from diptych.data.collate import Multiples
from diptych.data.costs import load_costs
from diptych.data.schedule.ragged import pack_rows
from diptych.shape.families import family
from diptych.train.step import LossModule
from tests.families.test_model import _loss, _read


def _batch(prepared, rows, *, row_tokens=None, multiples=Multiples()):  # noqa: B008 - frozen
    corpus = prepared.corpus
    batcher = Batcher(
        shards=corpus.shards,
        manifest=corpus.manifest,
        processor=corpus.processor,
        split="train",
        row_tokens=row_tokens,
        multiples=multiples,
    )
    batch, masked = batcher.make(pack_rows([np.array(row, dtype=np.int64) for row in rows]))
    assert not masked
    return batch


def _by_images(prepared):
    """Return a few samples of none, of one and of several images."""
    corpus = prepared.corpus
    costs = load_costs(corpus.sample_costs, manifest=corpus.manifest, split="train")
    counts = costs.column("num_images")
    return [np.flatnonzero(np.minimum(counts, 2) == number).tolist()[:3] for number in range(3)]


def _theirs(prepared, model, numbers):
    """Sum the losses of transformers' own forward over our labels."""
    total = 0.0
    for number in numbers:
        inputs = _read(prepared, number)
        labels = _batch(prepared, [[number]]).labels_BS[:, : inputs["input_ids"].shape[1]]
        with torch.no_grad():
            loss = model(**inputs, labels=labels).loss
        total += loss.item() * (labels[:, 1:] != -100).sum().item()
    return total


def test_a_batch_without_images_runs_the_vision_tower_and_learns_nothing_from_it(prepared):
    model = prepared.build()
    numbers = _by_images(prepared)[0]
    batch = _batch(prepared, [[number] for number in numbers])
    assert batch.num_patches == 0
    assert len(batch.pixel_values_PD) > 0
    loss = _loss(LossModule(model), batch)
    assert loss.item() == pytest.approx(_theirs(prepared, model, numbers), rel=2e-6)
    loss.backward()
    anatomy = family(prepared.info.family).anatomy
    sees = [
        each
        for name, each in model.named_parameters()
        if anatomy.tower(name) in ("vision", "connector") and each.requires_grad
    ]
    assert sees
    assert all(each.grad is not None and not each.grad.any() for each in sees)


@pytest.mark.parametrize("multiple", [None, 1, 2, 3])
def test_several_images_one_and_none_in_one_batch_in_few_shapes(prepared, multiple):
    model = prepared.build()
    unit = family(prepared.info.family).unit_rows(prepared.info.image)
    patches = 2 * multiple * unit if multiple else None
    multiples = Multiples(tokens=32, patches=patches)
    none, one, several = _by_images(prepared)
    rows = [[none[0]], [several[0]], [one[0]], [several[1]], [one[1]]]
    batch = _batch(prepared, rows, multiples=multiples)
    if patches:
        assert len(batch.pixel_values_PD) % patches == 0
    expected = _theirs(prepared, model, [number for row in rows for number in row])
    with torch.no_grad():
        found = _loss(LossModule(model), batch)
    assert found.item() == pytest.approx(expected, rel=2e-6)
    packed = [[none[0], several[0], one[0]], [], [several[1], one[1]]]
    batch = _batch(prepared, packed, row_tokens=1024, multiples=multiples)
    with torch.no_grad():
        found = _loss(LossModule(model), batch)
    assert found.item() == pytest.approx(expected, rel=1e-5)
