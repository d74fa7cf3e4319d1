"""Every family's forward pass, gradient and FLOPs against transformers and torch alone."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers.vision_utils import get_vision_window_index

from diptych.data.batcher import Batcher
from diptych.data.schedule.ragged import pack_rows
from diptych.model.families import units
from diptych.model.inspect import inspect
from diptych.shape.counts import BatchCounts
from diptych.shape.flops import forward_flops, train_flops
from diptych.train.step import LossModule


def _batch(prepared, rows, *, row_tokens=None):
    batcher = Batcher(
        shards=prepared.corpus.shards,
        manifest=prepared.corpus.manifest,
        processor=prepared.corpus.processor,
        split="train",
        row_tokens=row_tokens,
    )
    batch, masked = batcher.make(pack_rows([np.array(row) for row in rows]))
    assert not masked
    return batch


def _loss(module, batch):
    return module(
        input_ids=batch.input_ids_BS,
        labels=batch.labels_BS,
        position_ids=batch.position_ids_3BS,
        pixel_values=batch.pixel_values_PD,
        grid_thw=batch.grid_thw_I3,
        source_ids=batch.source_ids_BS,
        segment_ids=batch.segment_ids_BS,
    )[0]


def _read(prepared, number):
    from PIL import Image

    from diptych.data.chat import to_chat
    from diptych.data.images.decode import decode
    from diptych.data.shards.reader import ShardReader

    corpus = prepared.corpus
    reader = ShardReader(corpus.shards, manifest=corpus.manifest, split="train")
    stored = reader.read(number)
    images = [Image.fromarray(decode(data)) for data in stored.images]
    return prepared.processor.apply_chat_template(
        to_chat(stored.sample.messages),
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        processor_kwargs={"images": images} if images else {},
    )


def test_the_loss_is_that_of_transformers_own_forward(prepared):
    """transformers: its processor's inputs, its positions, its masks, its loss over our labels."""
    model = prepared.build()
    module = LossModule(model)
    for number in range(8):
        batch = _batch(prepared, [[number]])
        inputs = _read(prepared, number)
        length = inputs["input_ids"].shape[1]
        labels = batch.labels_BS[:, :length]
        with torch.no_grad():
            theirs = model(**inputs, labels=labels).loss * (labels[:, 1:] != -100).sum()
            ours = _loss(module, batch)
        assert ours.item() == pytest.approx(theirs.item(), rel=2e-6)


def test_what_gets_a_gradient_is_what_is_said_to_train(prepared):
    model = prepared.build()
    batch = _batch(prepared, [[0], [1], [2], [3]])
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    _loss(LossModule(model), batch).backward()
    reached = {name for name, each in model.named_parameters() if each.grad is not None}
    assert reached == {each.name for each in inspect(prepared.case.model).trained}
    built = prepared.build()
    assert reached == {name for name, each in built.named_parameters() if each.requires_grad}


def test_units_hold_what_the_shape_says(prepared):
    shape = inspect(prepared.case.model)
    blocks = {each.block for each in shape.parameters} - {""}
    found = units(prepared.build())
    assert {unit.name for unit in found if unit.is_block} == blocks
    assert {unit.tower for unit in found} == {"vision", "connector", "language"}


def _squared_windows(model, *, grid_thw):
    """Windows as transformers cuts them, None in a tower that has none."""
    vision = model.config.vision_config
    if not hasattr(vision, "window_size"):
        return None
    _, ends = get_vision_window_index(
        grid_thw, vision.spatial_merge_size, vision.window_size, vision.patch_size
    )
    return int((ends.diff() ** 2).sum())


@pytest.mark.parametrize("frozen", [(), ("vision",)])
def test_flops_are_those_torch_counts(prepared, frozen, record_property):
    model = prepared.build()
    shape = inspect(prepared.case.model.model_copy(update={"freeze": frozen}))
    trained = {each.name for each in shape.trained}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)
    batch = _batch(prepared, [[0], [1], [2], [3]])
    module = LossModule(model)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        loss = _loss(module, batch)
        forward = counter.get_total_flops()
        loss.backward()
    rows, length = batch.input_ids_BS.shape
    counts = BatchCounts.of(
        [length] * rows,
        image_patches=[math.prod(grid) for _, *grid in batch.grid_thw_I3.tolist()],
        num_head_tokens=batch.num_label_tokens,
    )
    counts = replace(counts, squared_windows=_squared_windows(model, grid_thw=batch.grid_thw_I3))
    tile_patches = getattr(prepared.info.image, "side_px", None)
    if tile_patches is not None:
        image = prepared.info.image
        per_tile = (image.side_px // image.patch_px) ** 2
        num_patches = len(batch.pixel_values_PD) * per_tile
        counts = BatchCounts.of(
            [length] * rows, image_patches=[num_patches], num_head_tokens=batch.num_label_tokens
        )
    total = counter.get_total_flops()
    ours = forward_flops(shape, counts=counts).total
    our_total = train_flops(shape, counts=counts)
    record_property("forward", ours)
    record_property("forward_of_torch", forward)
    record_property("training", our_total)
    record_property("training_of_torch", total)
    assert ours == pytest.approx(forward, rel=0.01)
    assert our_total == pytest.approx(total, rel=0.01)


def test_a_sample_of_a_packed_row_does_not_see_its_neighbours(prepared):
    """Another neighbour changes neither a sample's loss nor the gradient it asks for."""
    model = prepared.build()
    module = LossModule(model)

    def alone(batch, segment):
        """The loss of one sample of the row, and the gradient of that."""
        model.zero_grad()
        labels = torch.where(batch.segment_ids_BS == segment, batch.labels_BS, -100)
        batch = batch.change(lambda name, tensor: labels if name == "labels_BS" else tensor)
        loss = _loss(module, batch)
        loss.backward()
        gradient = {
            name: each.grad.clone()
            for name, each in model.named_parameters()
            if each.grad is not None
        }
        return loss.detach(), gradient

    first = _batch(prepared, [[0, 4, 1]], row_tokens=640)
    other = _batch(prepared, [[0, 5, 1]], row_tokens=640)
    assert not torch.equal(first.input_ids_BS, other.input_ids_BS)
    for segment in (1, 3):
        loss, gradient = alone(first, segment)
        again, other_gradient = alone(other, segment)
        assert loss.item() == pytest.approx(again.item(), rel=1e-6)
        for name, value in gradient.items():
            torch.testing.assert_close(value, other_gradient[name], rtol=1e-4, atol=1e-6)
    single = _batch(prepared, [[0]])
    assert _loss(module, single).item() == pytest.approx(alone(first, 1)[0].item(), rel=1e-5)
