from __future__ import annotations

import numpy as np
import pytest
import torch

from diptych.core.records import Message
from diptych.data.chat import ChatTokenizer, to_chat
from diptych.data.collate import Ready, collate
from diptych.data.encode import encode
from diptych.data.images.decode import decode
from diptych.data.images.patches import load_patcher
from diptych.data.processor import read_processor_info
from diptych.data.shards.reader import ShardReader


@pytest.fixture(scope="module")
def auto_processor(corpus):
    from transformers import AutoProcessor

    return AutoProcessor.from_pretrained(corpus.processor, local_files_only=True)


@pytest.fixture(scope="module")
def info(corpus):
    return read_processor_info(corpus.processor)


@pytest.fixture(scope="module")
def prepare(corpus, info):
    """Make (messages, images) ready."""
    tokenizer = ChatTokenizer(corpus.processor)
    patcher = load_patcher(corpus.processor, image=info.image)

    def prepare(messages, images, *, source=0):
        sizes = [(image.shape[1], image.shape[0]) for image in images]
        encoded = encode(messages, images_wh=sizes, tokenizer=tokenizer, info=info)
        return Ready(encoded, tuple(map(patcher.cut, images)), source)

    return prepare


@pytest.fixture(scope="module")
def put(corpus, info):
    """Collate rows of what is ready."""
    patcher = load_patcher(corpus.processor, image=info.image)

    def put(rows, *, num_sources=1, row_tokens=None):
        return collate(
            rows, patcher=patcher, info=info, num_sources=num_sources, row_tokens=row_tokens
        )

    return put


@pytest.fixture(scope="module")
def make(prepare, put):
    """Make a micro-batch of (messages, images) pairs, and of None; one sample a row."""

    def make(rows):
        return put([[] if row is None else [prepare(*row)] for row in rows])

    return make


@pytest.fixture(scope="module")
def rows(corpus):
    reader = ShardReader(corpus.shards, manifest=corpus.manifest, split="train")
    stored = [reader.read(row) for row in range(len(reader))]
    return [(item.sample.messages, [decode(data) for data in item.images]) for item in stored]


@pytest.fixture(scope="module")
def model(info):
    """A tiny Qwen3-VL, straight from transformers."""
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    torch.manual_seed(0)
    config = Qwen3VLConfig(
        text_config={
            "vocab_size": info.tokens.num_tokens,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [4, 2, 2],
            },
        },
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "out_hidden_size": 32,
            "patch_size": info.image.patch_px,
            "spatial_merge_size": info.image.merge,
            "temporal_patch_size": info.image.temporal_patch,
            "deepstack_visual_indexes": [0],
            "num_position_embeddings": 64,
        },
        image_token_id=info.tokens.image,
        video_token_id=info.tokens.video,
        vision_start_token_id=info.tokens.vision_start,
        vision_end_token_id=info.tokens.vision_end,
    )
    return Qwen3VLForConditionalGeneration(config).eval()


def logits(model, batch):
    return model(
        input_ids=batch.input_ids_BS,
        position_ids=batch.position_ids_3BS,
        pixel_values=batch.pixel_values_PD,
        image_grid_thw=batch.grid_thw_I3,
    ).logits


def transformers_batch(auto_processor, rows):
    from PIL import Image

    texts = [
        auto_processor.apply_chat_template(to_chat(messages), tokenize=False)
        for messages, _ in rows
    ]
    images = [[Image.fromarray(image) for image in pixels] for _, pixels in rows]
    return auto_processor(
        text=texts,
        images=images if any(images) else None,
        padding=True,
        padding_side="right",
        return_tensors="pt",
    )


def test_a_batch_is_bitwise_what_transformers_makes(make, rows, auto_processor, model):
    seen = set()
    for first in range(0, len(rows), 8):
        part = rows[first : first + 8]
        seen |= {len(pixels) for _, pixels in part}
        batch, made = make(part), transformers_batch(auto_processor, part)
        assert torch.equal(batch.input_ids_BS, made["input_ids"])
        assert torch.equal(batch.pixel_values_PD, made["pixel_values"])
        assert torch.equal(batch.grid_thw_I3, made["image_grid_thw"])
        positions_3BS, _ = model.model.get_rope_index(
            made["input_ids"],
            made["mm_token_type_ids"],
            image_grid_thw=made["image_grid_thw"],
            attention_mask=made["attention_mask"],
        )
        real_BS = made["attention_mask"].bool()
        assert torch.equal(batch.position_ids_3BS[:, real_BS], positions_3BS[:, real_BS])
        assert (batch.labels_BS[~real_BS] == -100).all()
    assert seen == {0, 1, 2}


def test_counts_by_hand(make):
    image = np.zeros((16, 32, 3), np.uint8)
    rows = [
        ([Message(role="user", text="<image>"), Message(role="assistant", text="12")], [image]),
        None,
        ([Message(role="user", text=""), Message(role="assistant", text="3")], []),
    ]
    batch = make(rows)
    # Row 0: <|im_start|> user \n <|vision_start|> 2 images <|vision_end|> <|im_end|> \n,
    # then <|im_start|> assistant \n 1 2 <|im_end|> \n: 16 tokens. Row 2 has no image and one digit.
    assert batch.input_ids_BS.shape == (3, 16)
    assert batch.num_rows == batch.num_samples == 2
    assert batch.segment_ids_BS is None
    assert batch.source_ids_BS.tolist() == [[0] * 16, [-1] * 16, [0] * 11 + [-1] * 5]
    assert batch.num_samples_by_source.tolist() == [2]
    assert batch.num_label_tokens_by_source.tolist() == [5]
    assert batch.num_label_tokens == 3 + 2
    assert batch.num_image_tokens == 2
    assert batch.num_patches == 8
    assert batch.num_text_tokens == 14 + 11
    assert batch.num_slots == 48
    assert batch.pixel_values_PD.shape == (8, 3 * 8 * 8)
    assert (batch.input_ids_BS[1] == 0).all()
    assert (batch.labels_BS[1] == -100).all()


TEXT_ROWS = [
    (
        [
            Message(role="user", text="What is one more than 41?"),
            Message(role="assistant", text="42"),
        ],
        [],
    ),
    ([Message(role="user", text="And?"), Message(role="assistant", text="7")], []),
]


@pytest.mark.parametrize(
    ("order", "at"),
    [((0, 1), 1), ((1, 0), 0), ((1, None), 1), ((None, 0), 0), ((None,), 0), ((0,), 0)],
)
def test_without_images_a_dummy_stands_where_nothing_sees_it(make, info, order, at):
    batch = make([None if row is None else TEXT_ROWS[row] for row in order])
    is_image = batch.input_ids_BS == info.tokens.image
    assert is_image.nonzero().tolist() == [[at, batch.input_ids_BS.shape[1] - 1]]
    assert batch.grid_thw_I3.tolist() == [[1, 2, 2]]
    assert batch.pixel_values_PD.shape == (4, 192)
    assert (batch.labels_BS[is_image] == -100).all()
    assert (batch.source_ids_BS[is_image] == -1).all()
    assert (batch.num_image_tokens, batch.num_patches) == (0, 0)
    lengths = [int((row_S == 0).sum()) for row_S in batch.source_ids_BS]
    assert lengths[at] < batch.input_ids_BS.shape[1]


def test_the_dummy_changes_no_logit_and_reaches_the_vision_tower(make, auto_processor, model):
    batch = make(TEXT_ROWS)
    made = transformers_batch(auto_processor, TEXT_ROWS)
    real_BS = made["attention_mask"].bool()
    with torch.no_grad():
        expected = model(input_ids=made["input_ids"], attention_mask=made["attention_mask"]).logits
    found = logits(model, batch)
    width = made["input_ids"].shape[1]
    torch.testing.assert_close(found[:, :width][real_BS], expected[real_BS], rtol=0, atol=1e-6)
    model.zero_grad()
    targets_BS = batch.labels_BS[:, 1:]
    loss = torch.nn.functional.cross_entropy(
        found[:, :-1].transpose(1, 2), targets_BS, ignore_index=-100, reduction="sum"
    )
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if "visual" in name}
    assert all(grad is not None for grad in grads.values()), "the tower must have run"
    assert all((grad == 0).all() for grad in grads.values()), "nothing may be learnt from it"


def test_padding_changes_no_logit(make, rows, model):
    part = [rows[0], None, *rows[3:6]]
    batch = make(part)
    with torch.no_grad():
        together = logits(model, batch)
        for number, row in enumerate(part):
            if row is None:
                continue
            alone = logits(model, make([row]))
            length = int((batch.input_ids_BS[number] != 0).sum())
            torch.testing.assert_close(
                together[number, :length], alone[0, :length], rtol=0, atol=2e-6
            )


def test_to_moves_every_tensor(make, rows):
    moved = make(rows[:2]).to(torch.device("meta"))
    tensors = [value for value in vars(moved).values() if isinstance(value, torch.Tensor)]
    assert len(tensors) == 6
    assert all(tensor.is_meta for tensor in tensors)
