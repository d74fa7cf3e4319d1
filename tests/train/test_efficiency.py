"""FLOPs of a step: the same as the whole arithmetic for every family, and torch's own count."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForImageTextToText

from diptych.core.records import Layout, MemoryOptions, ModelSpec
from diptych.model.inspect import inspect
from diptych.model.qwen3_vl import config_of
from diptych.shape.counts import BatchCounts
from diptych.shape.flops import train_flops
from diptych.train.efficiency import Efficiency
from diptych.train.exchange import Counts
from tests.families.cases import CASES
from tests.shape.conftest import STARTER

LENGTH, LABELS, GRID = 40, 11, (4, 6)


@pytest.fixture
def starter_sizes():
    return {group: dict(values) for group, values in STARTER.items()}


def _counts(**changed):
    values = {
        "num_rows": 2,
        "num_samples": 3,
        "num_paired": 2,
        "num_label_tokens": 17,
        "num_text_tokens": 61,
        "num_image_tokens": 32,
        "num_patches": 128,
        "num_slots": 120,
        "num_masked": 0,
        "squared_slots": 7200,
        "squared_tokens": 3001,
        "squared_patches": 8192,
        "idle_fraction": 0.0,
        "num_samples_by_source": [3],
        "num_label_tokens_by_source": [17],
    }
    return Counts(**{**values, **changed})


@pytest.mark.parametrize("name", sorted(CASES))
def test_counting_by_what_each_count_costs_is_counting_all_anew(name):
    shape = inspect(CASES[name].model)
    found = Efficiency(shape, layout=Layout(), flops_per_s=None).of(_counts(), step_s=1.0)
    model = BatchCounts(
        num_tokens=93,
        squared_tokens=3001,
        num_patches=128,
        squared_patches=8192,
        num_head_tokens=17,
    )
    padded = BatchCounts(
        num_tokens=120,
        squared_tokens=7200,
        num_patches=128,
        squared_patches=8192,
        num_head_tokens=17,
    )
    assert found.model_flops == pytest.approx(train_flops(shape, counts=model), rel=1e-12)
    assert found.hardware_flops == pytest.approx(train_flops(shape, counts=padded), rel=1e-12)
    assert (found.mfu, found.hfu) == (None, None)


def test_shares_are_of_what_all_devices_could_have_done(starter_sizes):
    shape = inspect(ModelSpec(sizes=starter_sizes))
    layout = Layout(engine="ddp", dp=4)
    found = Efficiency(shape, layout=layout, flops_per_s=1e9).of(_counts(), step_s=0.5)
    assert found.mfu == pytest.approx(found.model_flops / 2e9)
    assert found.hfu == pytest.approx(found.hardware_flops / 2e9)
    assert found.hfu > found.mfu > 0


def test_recomputed_blocks_count_as_torch_counts_them(starter_sizes):
    starter_sizes["text"]["num_key_value_heads"] = 2
    config = config_of(starter_sizes, tie_word_embeddings=True, tokens=None)
    config.image_token_id = 7
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="sdpa")
    vision, text = model.model.visual, model.model.language_model
    for block in [*vision.blocks, *text.layers, vision.merger, *vision.deepstack_merger_list]:
        plain = block.forward
        block.forward = lambda *inputs, plain=plain, **named: checkpoint(
            plain, *inputs, use_reentrant=False, early_stop=False, **named
        )
    ids = torch.randint(10, 400, (1, LENGTH))
    num_patches = GRID[0] * GRID[1]
    ids[0, 3 : 3 + num_patches // 4] = 7
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        hidden = model.model(
            input_ids=ids,
            position_ids=torch.arange(LENGTH).expand(3, 1, LENGTH),
            pixel_values=torch.randn(num_patches, 3 * 2 * 8 * 8),
            image_grid_thw=torch.tensor([[1, *GRID]]),
            attention_mask=None,
            use_cache=False,
        ).last_hidden_state
        model.lm_head(hidden[0, :LABELS]).logsumexp(-1).sum().backward()
    layout = Layout(memory=MemoryOptions(recompute="blocks"))
    efficiency = Efficiency(
        inspect(ModelSpec(sizes=starter_sizes)), layout=layout, flops_per_s=None
    )
    found = efficiency.of(
        _counts(
            num_label_tokens=LABELS,
            num_slots=LENGTH,
            squared_slots=LENGTH**2,
            num_patches=num_patches,
            squared_patches=num_patches**2,
        ),
        step_s=1.0,
    )
    assert found.hardware_flops == pytest.approx(counter.get_total_flops(), rel=1e-9)
