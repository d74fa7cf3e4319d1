"""Every kernel of attention is told who sees whom in every family: its loss is that of sdpa.

Flash Attention's kernels run on GPUs alone: a plain one that takes the same arguments stands for
them. FlexAttention runs here without its compiler, and forward alone.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations import flex_attention as theirs
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from diptych.model.attention import kernels
from diptych.shape.families import family
from diptych.train.step import LossModule
from tests.families.test_model import _batch, _loss

ROWS = [[0, 4, 1], [2, 3]]
ROW_TOKENS = 640


@pytest.fixture
def flash(monkeypatch):
    """Stand in for Flash Attention: [B, heads, S, width] in, and where samples begin."""
    calls = []

    def attend(module, query, key, value, attention_mask, *, scaling, **options):
        assert attention_mask is None
        ends, longest = options["cu_seq_lens_q"], options["max_length_q"]
        assert torch.equal(ends, options["cu_seq_lens_k"])
        assert int(ends.diff().max()) <= longest
        flat = [each.transpose(1, 2).flatten(0, 1) for each in (query, key, value)]
        made = []
        for start, end in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
            part = [each[start:end].transpose(0, 1)[None] for each in flat]
            made.append(
                scaled_dot_product_attention(*part, is_causal=True, scale=scaling, enable_gqa=True)[
                    0
                ].transpose(0, 1)
            )
        calls.append(module)
        return torch.cat(made).view(query.shape[0], query.shape[2], *query.shape[1::2]), None

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "flash_attention_2", attend)
    return calls


@pytest.fixture
def uncompiled(monkeypatch):
    """Run FlexAttention operator by operator; the calls are noted."""
    calls = []

    def attend(*tensors, training=False, **options):
        calls.append(tensors)
        return flex_attention(*tensors, **options)

    monkeypatch.setattr(theirs, "compile_friendly_flex_attention", attend)
    return calls


@pytest.mark.parametrize("row_tokens", [ROW_TOKENS, None])
def test_flash_gets_where_samples_begin(prepared, flash, row_tokens):
    if family(prepared.info.family).sees_ahead:
        pytest.skip("Flash Attention cannot look ahead, and is refused")
    batch = _batch(prepared, ROWS if row_tokens else [[0], [4]], row_tokens=row_tokens)
    model = prepared.build()
    module = LossModule(model)
    expected = _loss(module, batch)
    expected.backward()
    wanted = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    model.zero_grad()
    kernels.use(model, kernel="flash_2")
    found = _loss(module, batch)
    found.backward()
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    for name, value in wanted.items():
        torch.testing.assert_close(model.get_parameter(name).grad, value, rtol=1e-4, atol=1e-5)
    assert len(flash) == model.config.text_config.num_hidden_layers


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("row_tokens", [ROW_TOKENS, None])
def test_flex_computes_what_sdpa_does(prepared, uncompiled, row_tokens):
    batch = _batch(prepared, ROWS if row_tokens else [[0], [4]], row_tokens=row_tokens)
    model = prepared.build()
    module = LossModule(model)
    with torch.no_grad():
        expected = _loss(module, batch)
        kernels.use(model, kernel="flex")
        found = _loss(module, batch)
        kernels.use(model, kernel="sdpa")
        again = _loss(module, batch)
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    assert len(uncompiled) == model.config.text_config.num_hidden_layers
    assert again.item() == expected.item()


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_goes_with_autocast(prepared, uncompiled):
    """Rotary tables in fp32 widen queries and keys, and not values."""
    batch = _batch(prepared, ROWS, row_tokens=ROW_TOKENS)
    model = prepared.build()
    module = LossModule(model)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        expected = _loss(module, batch)
        kernels.use(model, kernel="flex")
        found = _loss(module, batch)
    assert found.item() == pytest.approx(expected.item(), rel=2e-2)
