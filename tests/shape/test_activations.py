"""The estimate of activations, held against the bytes of tensors that live in a real step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from diptych.core.records import ImageSettings, Layout, MemoryOptions, ModelSpec, TokenIds
from diptych.model.assemble import build
from diptych.model.families import units
from diptych.model.inspect import inspect
from diptych.parallel import activations, recompute
from diptych.shape.activations import activation_bytes
from diptych.shape.counts import BatchCounts
from diptych.train.step import LossModule

SIZES = {
    "text": {
        "vocab_size": 2048,
        "hidden_size": 96,
        "intermediate_size": 320,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    },
    "vision": {
        "depth": 4,
        "hidden_size": 64,
        "num_heads": 4,
        "intermediate_size": 200,
        "patch_size": 8,
        "num_position_embeddings": 256,
        "deepstack_visual_indexes": [0, 1],
    },
}
TOKENS = TokenIds(num_tokens=2000, pad=0, eos=1, image=2, video=3, vision_start=4, vision_end=5)
IMAGE = ImageSettings(patch_px=8, merge=2, temporal_patch=2, min_area_px=64, max_area_px=65536)
BLOCKS = {"recompute": "blocks"}
OPTIONS = {
    "none": {},
    "blocks": BLOCKS,
    "every second block": {**BLOCKS, "vision_every": 2, "language_every": 2},
    "blocks of the decoder": {**BLOCKS, "vision_every": 0, "recompute_connector": False},
    "operators": {"recompute": "operators"},
    "chunked": {"loss": "chunked", "loss_chunk_tokens": 20},
    "blocks, chunked": {**BLOCKS, "loss": "chunked", "loss_chunk_tokens": 20},
    "offloaded": {"offload_activations": True},
}


@pytest.fixture
def live_bytes(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    from _live import LiveBytes

    to_host = activations._Offload._to_host
    live = LiveBytes()

    def left_out(offload, tensor):
        copy = to_host(offload, tensor)
        live.leave_out(copy)
        return copy

    monkeypatch.setattr(activations._Offload, "_to_host", left_out)
    return live


def measured(live, *, memory, precision):
    """Live bytes at the peak of a step on 2 x 128 tokens, 60 labels a row; gradients are there."""
    model = build(ModelSpec(sizes=SIZES), tokens=TOKENS, image=IMAGE, seed=0)
    module = LossModule(model, options=memory).train()
    recompute.apply(units(model), options=memory)
    activations.apply(module, layout=Layout(memory=memory))
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    ids = torch.randint(10, 1900, (2, 128))
    ids[:, 5 : 5 + 24] = TOKENS.image
    inputs = {
        "input_ids": ids,
        "labels": torch.where(torch.arange(128) >= 68, ids, -100),
        "position_ids": torch.arange(128).expand(3, 2, 128),
        "pixel_values": torch.randn(192, 3 * 2 * 8 * 8),
        "grid_thw": torch.tensor([[1, 8, 12], [1, 8, 12]]),
        "source_ids": torch.zeros((2, 128), dtype=torch.int16),
    }
    with live:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
            loss = module(**inputs)[0]
        loss.backward()
    return live.peak


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", OPTIONS)
def test_the_estimate_is_near_what_lives(name, precision, live_bytes):
    memory = MemoryOptions(**OPTIONS[name])
    peak = measured(live_bytes, memory=memory, precision=precision)
    shape = inspect(ModelSpec(sizes=SIZES))
    counts = BatchCounts.of([128] * 2, image_patches=[96] * 2, num_head_tokens=120)
    estimate = activation_bytes(shape, counts=counts, precision=precision, memory=memory)
    if precision == "bf16":
        # Autocast's copies of the weights live, too; the planner counts them beside activations.
        estimate += 2 * shape.num_parameters
    assert peak <= estimate <= 1.4 * peak
