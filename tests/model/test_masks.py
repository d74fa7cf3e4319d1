"""Masks by hand, against transformers' own, and in every kernel's form against each other."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention.flex_attention import create_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoConfig, AutoModel, Gemma3Config
from transformers.models.gemma3.modeling_gemma3 import create_masks_for_vision_model

from diptych.model.attention.masks import (
    MaskRule,
    blocks,
    dense,
    lengths,
    number_images,
    windows_of,
)
from diptych.model.gemma3 import mask_rule
from tests.families.cases import DECODER

IMAGE = 9
CAUSAL = MaskRule()
GEMMA3 = MaskRule(windows={"full_attention": None, "sliding_attention": 3}, image_token_id=IMAGE)


def _ids(*rows):
    return torch.tensor(rows)


def _segments(*rows):
    return torch.tensor(rows, dtype=torch.int32)


def test_a_token_sees_itself_and_what_came_before_it_in_its_sample():
    mask = dense(CAUSAL, input_ids_BS=_ids([1] * 5), segment_ids_BS=_segments([1, 1, 2, 2, 0]))
    assert mask.shape == (1, 1, 5, 5)
    assert mask[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 0, 1, 0, 0],
        [0, 0, 1, 1, 0],
        [0, 0, 0, 0, 1],
    ]


def test_one_sample_a_row_needs_no_mask_where_causal_is_all():
    assert dense(CAUSAL, input_ids_BS=_ids([1, IMAGE]), segment_ids_BS=None) is None


def test_images_are_numbered_by_where_they_stand():
    found = number_images(_ids([9, 9, 1, 9, 1], [1, 1, 9, 9, 9]), image_token_id=IMAGE)
    assert found.tolist() == [[0, 0, -1, 1, -1], [-1, -1, 0, 0, 0]]


def test_an_images_tokens_see_each_other_and_a_window_cuts_what_came_before():
    masks = dense(GEMMA3, input_ids_BS=_ids([1, 9, 9, 9, 9, 1, 9]), segment_ids_BS=None)
    assert masks["full_attention"][0, 0].int().tolist() == [
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 1, 1, 1, 0, 0],
        [1, 1, 1, 1, 1, 0, 0],
        [1, 1, 1, 1, 1, 0, 0],
        [1, 1, 1, 1, 1, 0, 0],
        [1, 1, 1, 1, 1, 1, 0],
        [1, 1, 1, 1, 1, 1, 1],
    ]
    assert masks["sliding_attention"][0, 0].int().tolist() == [
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 1, 1, 1, 0, 0],
        [1, 1, 1, 1, 1, 0, 0],
        [0, 1, 1, 1, 1, 0, 0],
        [0, 0, 1, 1, 1, 0, 0],
        [0, 0, 0, 1, 1, 1, 0],
        [0, 0, 0, 0, 1, 1, 1],
    ]


def test_images_of_two_samples_that_touch_do_not_see_each_other():
    masks = dense(
        GEMMA3,
        input_ids_BS=_ids([1, 9, 9, 9, 9, 1]),
        segment_ids_BS=_segments([1, 1, 1, 2, 2, 2]),
    )
    assert masks["full_attention"][0, 0].int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [0, 0, 0, 1, 1, 0],
        [0, 0, 0, 1, 1, 0],
        [0, 0, 0, 1, 1, 1],
    ]


@pytest.mark.parametrize("seed", range(5))
def test_gemma3s_masks_are_transformers_own(seed):
    """Rows of text and images, and packed rows sample by sample."""
    draw = torch.Generator().manual_seed(seed)
    config = Gemma3Config(
        text_config={"sliding_window": 5, "num_hidden_layers": 6}, image_token_index=IMAGE
    )
    config.text_config._attn_implementation = "sdpa"
    rule = mask_rule(config)
    runs = [int(torch.randint(1, 9, (), generator=draw)) for _ in range(8)]
    ids = torch.cat([torch.full((run,), (1, IMAGE)[i % 2]) for i, run in enumerate(runs)])[None]

    def theirs(part):
        numbers = number_images(part, image_token_id=IMAGE)
        return create_masks_for_vision_model(
            config=config.text_config,
            inputs_embeds=torch.zeros((1, part.shape[1], 1)),
            attention_mask=None,
            cache=None,
            position_ids=None,
            block_sequence_ids=numbers,
        )

    ours = dense(rule, input_ids_BS=ids, segment_ids_BS=None)
    expected = theirs(ids)
    for kind, mask in expected.items():
        assert torch.equal(ours[kind], mask), kind
    packed = torch.cat([ids, ids[:, :7]], dim=1)
    segments = torch.tensor([[1] * ids.shape[1] + [2] * 7])
    found = dense(rule, input_ids_BS=packed, segment_ids_BS=segments)
    for kind, mask in theirs(ids[:, :7]).items():
        assert torch.equal(found[kind][:, :, -7:, -7:], mask), kind
        assert torch.equal(found[kind][:, :, :-7, :-7], expected[kind]), kind
        assert not found[kind][:, :, -7:, :-7].any()
        assert not found[kind][:, :, :-7, -7:].any()


def _packed(num_tokens=300, *, seed=0):
    """Two rows of samples of random lengths, with images in them, and padding behind."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.where(torch.rand((2, num_tokens), generator=draw) < 0.5, IMAGE, 1)
    cuts = torch.rand((2, num_tokens), generator=draw) < 0.02
    segments = 1 + cuts.cumsum(dim=1)
    segments[:, num_tokens - 20 :] = 0
    return ids, segments.to(torch.int32)


def _by_kind(made):
    return made if isinstance(made, dict) else {"": made}


@pytest.mark.parametrize("rule", [CAUSAL, GEMMA3], ids=["causal", "gemma3"])
@pytest.mark.parametrize("is_packed", [True, False])
def test_a_block_mask_is_the_dense_mask(rule, is_packed):
    ids, segments = _packed()
    given = {"input_ids_BS": ids, "segment_ids_BS": segments if is_packed else None}
    wanted = dense(rule, **given)
    if wanted is None:
        wanted = torch.ones((300, 300), dtype=torch.bool).tril().expand(2, 1, 300, 300)
    for kind, made in _by_kind(blocks(rule, **given)).items():
        mask = _by_kind(wanted)[kind]
        assert torch.equal(create_mask(made.mask_mod, 2, 1, 300, 300, device="cpu"), mask)
        # What a kernel visits: whole blocks unseen, blocks looked at, blocks all seen.
        assert _visited(made, num_blocks=3) == _expected_visits(mask, block=128)


def _visited(made, *, num_blocks):
    found = {}
    for row in range(2):
        for query in range(num_blocks):
            partial = made.kv_indices[row, 0, query, : made.kv_num_blocks[row, 0, query]]
            whole = made.full_kv_indices[row, 0, query, : made.full_kv_num_blocks[row, 0, query]]
            found |= {(row, query, key): "partial" for key in partial.tolist()}
            found |= {(row, query, key): "whole" for key in whole.tolist()}
    return found


def _expected_visits(mask, *, block):
    found = {}
    for row in range(mask.shape[0]):
        for query in range(-(-mask.shape[2] // block)):
            for key in range(-(-mask.shape[3] // block)):
                part = mask[
                    row,
                    0,
                    query * block : (query + 1) * block,
                    key * block : (key + 1) * block,
                ]
                if part.any():
                    is_whole = bool(part.all()) and part.shape == (block, block)
                    found[row, query, key] = "whole" if is_whole else "partial"
    return found


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("rule", [CAUSAL, GEMMA3], ids=["causal", "gemma3"])
def test_flex_attention_computes_what_sdpa_does(rule):
    ids, segments = _packed()
    given = {"input_ids_BS": ids, "segment_ids_BS": segments}
    draw = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn((2, 2, 300, 16), generator=draw) for _ in range(3))
    masks = _by_kind(dense(rule, **given))
    for kind, made in _by_kind(blocks(rule, **given)).items():
        with torch.no_grad():
            found = flex_attention(query, key, value, block_mask=made)
        expected = scaled_dot_product_attention(query, key, value, attn_mask=masks[kind])
        torch.testing.assert_close(found, expected)


def test_lengths_are_where_samples_and_padding_begin():
    found = lengths(
        input_ids_BS=torch.zeros((2, 6), dtype=torch.int64),
        segment_ids_BS=_segments([1, 1, 1, 2, 2, 0], [1, 1, 1, 1, 1, 1]),
    )
    # 3 + 2 + 1 of padding, then a row of 6.
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        assert found[name].tolist() == [0, 3, 5, 6, 12]
        assert found[name].dtype == torch.int32
    assert found["max_length_q"] == found["max_length_k"] == 6


def test_rows_of_one_sample_are_as_long_as_rows():
    found = lengths(input_ids_BS=torch.zeros((3, 4), dtype=torch.int64), segment_ids_BS=None)
    assert found["cu_seq_lens_q"].tolist() == [0, 4, 8, 12]


def test_equal_numbers_in_neighbouring_rows_are_two_samples():
    found = lengths(
        input_ids_BS=torch.zeros((2, 2), dtype=torch.int64),
        segment_ids_BS=_segments([1, 2], [2, 2]),
    )
    assert found["cu_seq_lens_q"].tolist() == [0, 1, 2, 4]


@pytest.mark.parametrize("kind", ["qwen2", "mistral", "llama"])
def test_a_packed_row_keeps_a_decoders_windows(kind):
    """transformers computes each sample alone, with windows of its own making."""
    config = AutoConfig.for_model(
        kind,
        **{name: value for name, value in DECODER.items() if name != "head_dim"},
        **({} if kind == "llama" else {"sliding_window": 3}),
        **(
            {"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"]}
            if kind == "qwen2"
            else {}
        ),
    )
    torch.manual_seed(0)
    model = AutoModel.from_config(config, attn_implementation="sdpa").eval()
    ids = torch.arange(10, 29)[None]
    segments = torch.tensor([[1] * 8 + [2] * 11])
    rule = MaskRule(windows_of(config))
    with torch.no_grad():
        found = model(
            input_ids=ids,
            attention_mask=dense(rule, input_ids_BS=ids, segment_ids_BS=segments),
            position_ids=torch.tensor([[*range(8), *range(11)]]),
        ).last_hidden_state
        alone = [model(input_ids=part).last_hidden_state for part in (ids[:, :8], ids[:, 8:])]
    torch.testing.assert_close(found, torch.cat(alone, dim=1))
    if kind != "llama":
        with torch.no_grad():
            config.sliding_window = 4
            other = model(input_ids=ids[:, :8]).last_hidden_state
        assert not torch.allclose(other, alone[0])
