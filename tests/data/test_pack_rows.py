"""Several samples in a row: each has the tokens, labels and positions that it has alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from diptych.core.records import Message
from diptych.data.chat import ChatTokenizer
from diptych.data.collate import MicroBatch, Ready, collate
from diptych.data.encode import encode
from diptych.data.images.patches import load_patcher
from diptych.data.processor import read_processor_info
from diptych.shape.families import family

ROW_TOKENS = 160

TALKS = {
    "text": [("What is one more than 41?", "42")],
    "one image": [("<image>\nRead it.", "7")],
    "two images": [("<image>\n<image>\nWhich is larger?", "the second")],
    "interleaved": [("First <image> then <image> and last <image>?", "1 2 3")],
    "several turns": [("<image>\nRead it.", "12"), ("And once more?", "13"), ("So?", "done")],
    "images in later turns": [("Hello", "Hi"), ("<image>\nRead it.", "5")],
    "answer first": [("", "spoken unasked")],
}
SIZES_PX = [(16, 16), (40, 16), (17, 33), (64, 48)]


def talk(name: str) -> list[Message]:
    messages = []
    for question, answer in TALKS[name]:
        if question:
            messages.append(Message(role="user", text=question))
        messages.append(Message(role="assistant", text=answer))
    return messages


@pytest.fixture(scope="module")
def info(corpus):
    return read_processor_info(corpus.processor)


@pytest.fixture(scope="module")
def prepare(corpus, info):
    tokenizer, patcher = (
        ChatTokenizer(corpus.processor),
        load_patcher(corpus.processor, image=info.image),
    )

    def prepare(name: str, *, source: int = 0, seed: int = 0) -> Ready:
        rng = np.random.default_rng(seed)
        messages = talk(name)
        num_images = sum(message.text.count("<image>") for message in messages)
        sizes = [SIZES_PX[number] for number in rng.integers(0, len(SIZES_PX), num_images)]
        encoded = encode(messages, images_wh=sizes, tokenizer=tokenizer, info=info)
        images = [rng.integers(0, 256, (high, wide, 3), dtype=np.uint8) for wide, high in sizes]
        return Ready(encoded, tuple(map(patcher.cut, images)), source)

    return prepare


@pytest.fixture(scope="module")
def pack(corpus, info):
    patcher = load_patcher(corpus.processor, image=info.image)

    def pack(rows, *, row_tokens: int | None = ROW_TOKENS) -> MicroBatch:
        return collate(rows, patcher=patcher, info=info, num_sources=3, row_tokens=row_tokens)

    return pack


def fill(samples: list[Ready]) -> list[list[Ready]]:
    """Put samples into rows in their order, as many as fit."""
    rows: list[list[Ready]] = [[]]
    room = ROW_TOKENS
    for sample in samples:
        length = len(sample.encoded.input_ids)
        if length > room:
            rows.append([])
            room = ROW_TOKENS
        rows[-1].append(sample)
        room -= length
    return rows


SAMPLES = st.lists(
    st.tuples(st.sampled_from(sorted(TALKS)), st.integers(0, 2), st.integers(0, 3)), max_size=12
)


@settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(drawn=SAMPLES)
def test_unpacking_gives_back_each_sample_as_it_is_alone(drawn, prepare, pack):
    samples = [prepare(name, source=source, seed=seed) for name, source, seed in drawn]
    rows = fill(samples)
    batch = pack(rows)
    assert batch.segment_ids_BS is not None
    first_patch = 0
    for number, row in enumerate(rows):
        length = sum(len(sample.encoded.input_ids) for sample in row)
        segments_S = batch.segment_ids_BS[number]
        assert (segments_S[length:] == 0).all()
        assert (segments_S[:length].diff() >= 0).all(), "samples stand one after the other"
        assert set(segments_S[:length].tolist()) == set(range(1, len(row) + 1))
        for segment, sample in enumerate(row, start=1):
            alone = pack([[sample]], row_tokens=None)
            here = segments_S == segment
            span = slice(0, len(sample.encoded.input_ids))
            assert torch.equal(batch.input_ids_BS[number, here], alone.input_ids_BS[0, span])
            assert torch.equal(
                batch.position_ids_3BS[:, number, here], alone.position_ids_3BS[:, 0, span]
            )
            labels_S = batch.labels_BS[number, here]
            assert labels_S[0] == -100, "no sample is predicted from the one before"
            assert torch.equal(labels_S[1:], alone.labels_BS[0, span][1:])
            assert (batch.source_ids_BS[number, here] == sample.source).all()
            if sample.patches:
                count = len(alone.pixel_values_PD)
                part_PD = batch.pixel_values_PD[first_patch : first_patch + count]
                assert torch.equal(part_PD, alone.pixel_values_PD)
                first_patch += count
    assert first_patch in (0, len(batch.pixel_values_PD))


@settings(
    deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(drawn=SAMPLES)
def test_counts_are_the_sums_of_the_samples(drawn, prepare, pack):
    samples = [prepare(name, source=source, seed=seed) for name, source, seed in drawn]
    rows = fill(samples)
    batch, alone = pack(rows), [pack([[sample]], row_tokens=None) for sample in samples]
    for name in ("num_label_tokens", "num_text_tokens", "num_image_tokens", "num_patches"):
        assert getattr(batch, name) == sum(getattr(one, name) for one in alone)
    learnt_BS = batch.labels_BS[:, 1:] != -100
    assert batch.num_label_tokens == learnt_BS.sum()
    assert batch.num_samples == len(samples)
    assert batch.num_rows == sum(1 for row in rows if row)
    for source in range(3):
        of_source = batch.source_ids_BS[:, 1:] == source
        assert batch.num_label_tokens_by_source[source] == (learnt_BS & of_source).sum()
        assert batch.num_samples_by_source[source] == sum(s.source == source for s in samples)
    has_image = any(sample.patches for sample in samples)
    assert batch.input_ids_BS.shape == (len(rows), ROW_TOKENS)
    assert batch.num_slots == len(rows) * ROW_TOKENS
    assert (batch.num_image_tokens > 0) == has_image


def test_positions_restart_and_images_advance_them(prepare, pack, info):
    text, read = prepare("text"), prepare("one image", seed=3)
    batch = pack([[text, read]])
    start = len(text.encoded.input_ids)
    positions_S = batch.position_ids_3BS[0, 0]
    assert positions_S[:start].tolist() == list(range(start))
    assert positions_S[start] == 0
    alone = family(info.family).position_ids(
        read.encoded.input_ids,
        grids=read.encoded.grids,
        image=info.image,
        image_token_id=info.tokens.image,
    )
    assert positions_S[start : start + alone.shape[1]].tolist() == alone[0].tolist()


def test_every_row_has_the_length_of_the_spec(prepare, pack):
    batch = pack([[prepare("one image")], [], [prepare("text")] * 3])
    assert batch.input_ids_BS.shape == (3, ROW_TOKENS)
    assert batch.num_rows == 2
    assert batch.num_samples == 4
    assert (batch.segment_ids_BS[1] == 0).all()


def test_without_images_the_dummy_takes_room_or_one_column_more(prepare, pack, info):
    text = prepare("text")
    length = len(text.encoded.input_ids)
    roomy = pack([[text], [text, text]], row_tokens=2 * length)
    assert roomy.input_ids_BS.shape == (2, 2 * length)
    full = pack([[text, text]], row_tokens=2 * length)
    assert full.input_ids_BS.shape == (1, 2 * length + 1)
    for batch in (roomy, full):
        is_image = batch.input_ids_BS == info.tokens.image
        assert is_image.nonzero().tolist() == [[0, batch.input_ids_BS.shape[1] - 1]]
        assert batch.segment_ids_BS[is_image].tolist() == [0]
        assert batch.labels_BS[is_image].tolist() == [-100]
        assert batch.num_slots == batch.input_ids_BS.numel()
        assert batch.num_image_tokens == 0
