"""FLOPs against torch's own counter on a real forward and backward."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForImageTextToText

from diptych.core.records import ModelSpec
from diptych.model.inspect import inspect
from diptych.model.qwen3_vl import config_of
from diptych.shape.counts import BatchCounts
from diptych.shape.flops import forward_flops, train_flops

GRIDS = [(4, 6), (6, 8)]
ROWS, LENGTH, LABELS = 2, 40, 11


@pytest.fixture
def counted(starter_sizes):
    """FLOPs of one batch by torch's counter, forward and in all, and what the batch holds.

    The counter has no formula for the CPU's fused attention; the plain kernel's products it counts.
    """
    starter_sizes["text"]["num_key_value_heads"] = 2
    config = config_of(starter_sizes, tie_word_embeddings=True, tokens=None)
    config.image_token_id = 7
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="sdpa")
    ids = torch.randint(10, 400, (ROWS, LENGTH))
    for row, (rows, columns) in enumerate(GRIDS):
        ids[row, 3 : 3 + rows * columns // 4] = 7
    patches = sum(rows * columns for rows, columns in GRIDS)
    pixels = torch.randn(patches, 3 * 2 * 8 * 8)
    grid = torch.tensor([[1, *grid] for grid in GRIDS])
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        hidden = model.model(
            input_ids=ids,
            position_ids=torch.arange(LENGTH).expand(3, ROWS, LENGTH),
            pixel_values=pixels,
            image_grid_thw=grid,
            attention_mask=None,
            use_cache=False,
        ).last_hidden_state
        logits = model.lm_head(hidden[0, :LABELS])
        forward = counter.get_total_flops()
        logits.logsumexp(-1).sum().backward()
    counts = BatchCounts.of(
        [LENGTH] * ROWS,
        image_patches=[rows * columns for rows, columns in GRIDS],
        num_head_tokens=LABELS,
    )
    return forward, counter.get_total_flops(), counts


def _shape(sizes):
    return inspect(ModelSpec(sizes=sizes))


def test_forward_flops_equal_torchs_count(counted, starter_sizes):
    forward, _, counts = counted
    ours = forward_flops(_shape(starter_sizes), counts=counts)
    assert ours.total == pytest.approx(forward, rel=1e-9)


def test_train_flops_equal_torchs_count(counted, starter_sizes):
    _, both, counts = counted
    ours = train_flops(_shape(starter_sizes), counts=counts)
    assert ours == pytest.approx(both, rel=1e-9)


def test_flops_of_a_layer_worked_by_hand(starter_sizes):
    """4 layers of width 128, heads 4 x 32, intermediate 384; one row of 10 tokens, no image."""
    counts = BatchCounts.of([10], image_patches=[], num_head_tokens=2)
    flops = forward_flops(_shape(starter_sizes), counts=counts)
    assert flops.language == 2 * 10 * 4 * (4 * 128 * 128 + 3 * 128 * 384)
    assert flops.attention == 4 * (2 * 2 * 10 * 10 * 128)
    assert flops.head == 2 * 2 * 128 * 512
    assert flops.vision == 0


def test_counts_sum_rows_and_images():
    counts = BatchCounts.of([3, 4], image_patches=[16, 4], num_head_tokens=5)
    assert (counts.num_tokens, counts.squared_tokens) == (7, 25)
    assert (counts.num_patches, counts.squared_patches) == (20, 272)
