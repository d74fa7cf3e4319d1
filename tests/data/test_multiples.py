"""Micro-batches padded to few shapes: the same loss and gradient, the same counts, other shapes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from diptych.core.errors import LayoutError
from diptych.data.batcher import Batcher
from diptych.data.collate import Multiples
from diptych.data.images.features import Features
from diptych.data.processor import read_processor_info
from diptych.data.schedule.ragged import pack_rows
from diptych.model.assemble import build
from diptych.train.step import LossModule
from tests.conftest import TINY_MODEL

PADDED = Multiples(tokens=32, patches=64)
NUM_ROWS = 24
COUNTS = ("num_rows", "num_samples", "num_label_tokens", "num_text_tokens", "num_image_tokens")


@pytest.fixture(scope="module")
def batcher(corpus):
    return Batcher(
        shards=corpus.shards, manifest=corpus.manifest, processor=corpus.processor, split="train"
    )


@pytest.fixture(scope="module")
def module(corpus):
    info = read_processor_info(corpus.processor)
    model = build(TINY_MODEL, tokens=info.tokens, image=info.image, seed=1).double()
    return LossModule(model, num_sources=1)


def make(batcher, rows, *, row_tokens=None, multiples=Multiples()):  # noqa: B008 - frozen
    used = replace(batcher, row_tokens=row_tokens, multiples=multiples)
    return used.make(pack_rows([np.array(row, dtype=np.int64) for row in rows]))[0]


def gradient(module, batch):
    module.zero_grad()
    loss, _ = module(
        input_ids=batch.input_ids_BS,
        labels=batch.labels_BS,
        position_ids=batch.position_ids_3BS,
        pixel_values=batch.pixel_values_PD.double(),
        grid_thw=batch.grid_thw_I3,
        source_ids=batch.source_ids_BS,
        segment_ids=batch.segment_ids_BS,
    )
    loss.backward()
    found = [p.grad.reshape(-1) for p in module.parameters() if p.grad is not None]
    return loss.detach(), torch.cat(found)


def text_rows(batcher):
    return [row for row in range(NUM_ROWS) if not make(batcher, [[row]]).num_patches]


def groups(batcher):
    """Rows with images, without, an empty one among them, and one row alone."""
    text = text_rows(batcher)
    mixed = [[row] for row in range(6)]
    return {
        "mixed": mixed,
        "one row": [mixed[0]],
        "text": [[row] for row in text[:2]],
        "with an empty row": [mixed[1], [], [text[0]]],
        "filler in the middle": [mixed[0], [text[0]], mixed[2], mixed[3]],
    }


@pytest.mark.parametrize(
    "name", ["mixed", "one row", "text", "with an empty row", "filler in the middle"]
)
def test_padding_changes_no_loss_no_gradient_and_no_count(name, batcher, module):
    rows = groups(batcher)[name]
    plain, padded = make(batcher, rows), make(batcher, rows, multiples=PADDED)
    assert padded.input_ids_BS.shape[1] % 32 == 0
    assert padded.pixel_values_PD.shape[0] % 64 == 0
    assert padded.num_slots == padded.input_ids_BS.numel() > plain.num_slots
    for count in (*COUNTS, "num_patches"):
        assert getattr(padded, count) == getattr(plain, count)
    loss, expected = gradient(module, plain)
    same, found = gradient(module, padded)
    assert abs(same - loss) <= 1e-12 * abs(loss)
    assert torch.linalg.vector_norm(found - expected) <= 1e-12 * torch.linalg.vector_norm(expected)


@pytest.mark.parametrize("row_tokens", [160, 90])
def test_packed_rows_keep_their_length_or_get_the_one_other(row_tokens, batcher, module):
    seen = set()
    for first in range(0, NUM_ROWS, 2):
        rows = [[first], [first + 1]]
        plain = make(batcher, rows, row_tokens=row_tokens)
        padded = make(batcher, rows, row_tokens=row_tokens, multiples=PADDED)
        seen.add(padded.input_ids_BS.shape[1])
        loss, expected = gradient(module, plain)
        same, found = gradient(module, padded)
        assert abs(same - loss) <= 1e-12 * abs(loss)
        difference = torch.linalg.vector_norm(found - expected)
        assert difference <= 1e-12 * torch.linalg.vector_norm(expected)
    # 64 patches are 16 tokens at most: one step of 32.
    base = -(-row_tokens // 32) * 32
    assert seen <= {base, base + 32}
    assert len({*seen}) <= 2


def test_every_token_of_an_image_finds_its_own_features(batcher, module):
    """Features go to image tokens row by row, so the order of pixels and of tokens must agree."""
    rows = groups(batcher)["filler in the middle"]
    batch = make(batcher, rows, multiples=PADDED)
    is_image = batch.input_ids_BS == read_processor_info(batcher.processor).tokens.image
    per_row = is_image.sum(dim=1).tolist()
    sizes = (batch.grid_thw_I3.prod(dim=1) // 4).tolist()
    assert sum(per_row) == sum(sizes)
    alone = [make(batcher, [row]) for row in rows]
    begin = 0
    for count, one in zip(per_row, alone, strict=True):
        own = batch.pixel_values_PD[4 * begin : 4 * (begin + count)]
        if one.num_patches:
            assert torch.equal(own[: one.num_patches], one.pixel_values_PD)
            own = own[one.num_patches :]
        assert not own.any(), "what is left is the filler, which is grey"
        begin += count


def test_few_shapes_are_left(batcher):
    plain, padded = set(), set()
    for first in range(0, NUM_ROWS, 2):
        rows = [[first], [first + 1]]
        for seen, multiples in ((plain, Multiples()), (padded, Multiples(tokens=64, patches=256))):
            batch = make(batcher, rows, multiples=multiples)
            seen.add((batch.input_ids_BS.shape, batch.pixel_values_PD.shape))
    assert len(padded) <= 4 < len(plain)


@given(num_patches=st.integers(0, 500).map(lambda n: 4 * n), patches=st.integers(1, 60))
def test_the_filler_fills_up_to_the_next_multiple(num_patches, patches):
    multiple = 4 * patches
    filler = Multiples(patches=multiple).num_filler_rows(num_patches, unit=4)
    assert (num_patches + filler) % multiple == 0
    assert num_patches + filler > 0
    assert filler < multiple or (filler == multiple and not num_patches)
    assert Multiples().num_filler_rows(num_patches, unit=4) == (0 if num_patches else 4)


def test_patches_that_no_filler_fills_up_are_refused(batcher):
    used = replace(batcher, multiples=Multiples(patches=66))
    with pytest.raises(LayoutError, match=r"patch_multiple is 66\. A multiple of 4.*Set it to 68"):
        used.open()


def test_a_filler_of_features_is_as_wide_as_features(tmp_path):
    features = Features(folder=tmp_path, vision_sha256="x", width=48)
    assert features.filler(64).shape == (64, 48)
