"""Every family's images are pulled to their words: by what each sample alone gives the decoder."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from diptych.core.records import ContrastSpec
from diptych.shape.families import family
from diptych.train.step import LossModule
from tests.families.test_batches import _batch, _by_images
from tests.families.test_model import _read
from tests.model.test_contrast import by_formula

SPEC = ContrastSpec(weight=0.5, scale=7.0, bias=-2.0)


def _means(prepared, model, number):
    """Run transformers' own forward over one conversation; return its image's and words' means."""
    inputs = _read(prepared, number)
    labels = _batch(prepared, [[number]]).labels_BS[0, : inputs["input_ids"].shape[1]]
    taken = []
    decoder = model.get_submodule(family(prepared.info.family).anatomy.decoder)
    handle = decoder.register_forward_pre_hook(
        lambda _, args, kwargs: taken.append(kwargs["inputs_embeds"][0]), with_kwargs=True
    )
    with torch.no_grad():
        model(**inputs)
    handle.remove()
    is_image = inputs["input_ids"][0] == prepared.info.tokens.image
    return tuple(
        taken[0][chosen].double().mean(dim=0).tolist() for chosen in (is_image, labels != -100)
    )


def _run(module, batch):
    module.zero_grad()
    loss, _, *both = module(
        input_ids=batch.input_ids_BS,
        labels=batch.labels_BS,
        position_ids=batch.position_ids_3BS,
        pixel_values=batch.pixel_values_PD,
        grid_thw=batch.grid_thw_I3,
        source_ids=batch.source_ids_BS,
        segment_ids=batch.segment_ids_BS,
        labels_per_pair=10.0,
    )
    loss.backward()
    gradient = {
        name: p.grad.clone() for name, p in module.model.named_parameters() if p.requires_grad
    }
    return both, gradient


def test_images_are_pulled_to_the_words_of_their_sample(prepared):
    model = prepared.build()
    none, one, several = _by_images(prepared)
    batch = _batch(prepared, [[one[0], none[0], several[0]]], row_tokens=1024)
    assert batch.num_paired == 2
    means = [_means(prepared, model, number) for number in (one[0], several[0])]
    images, texts = zip(*means, strict=True)
    expected = by_formula(images, texts, scale=SPEC.scale, bias=SPEC.bias)
    both, gradient = _run(LossModule(model, contrast=SPEC).train(), batch)
    assert both[0][1].item() == pytest.approx(expected, rel=1e-5)
    _, plain = _run(LossModule(prepared.build()).train(), batch)
    tower = family(prepared.info.family).anatomy.tower
    norms = {"vision": 0.0, "connector": 0.0, "language": 0.0, "head": 0.0}
    for name, each in gradient.items():
        norms[tower(name)] += (each - plain[name]).square().sum().item()
    assert norms["vision"] > 1e-6
    assert norms["connector"] > 1e-6
    words = float(np.sum([each.square().sum() for each in plain.values()]))
    assert norms["language"] + norms["head"] < 1e-10 * words
