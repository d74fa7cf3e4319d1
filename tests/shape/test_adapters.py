"""Names with adapters, and FLOPs of an adapted model against torch's own counter."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from diptych.core.records import LoraSpec, ModelSpec
from diptych.data.processor import read_processor_info
from diptych.model.assemble import build
from diptych.model.features import freeze
from diptych.model.inspect import inspect
from diptych.shape.adapters import is_adapter, plain_name
from diptych.shape.counts import BatchCounts
from diptych.shape.flops import forward_flops, train_flops
from tests.conftest import TINY_MODEL

GRIDS = [(4, 6), (6, 8)]
ROWS, LENGTH, LABELS = 2, 40, 11


@pytest.mark.parametrize(
    ("name", "plain", "adapters"),
    [
        ("model.layers.0.q_proj.base_layer.weight", "model.layers.0.q_proj.weight", False),
        ("model.norm.weight", "model.norm.weight", False),
        ("model.q_proj.lora_A.default.weight", "model.q_proj.lora_A.default.weight", True),
        ("q_proj.lora_magnitude_vector.default.weight",) * 2 + (True,),
    ],
)
def test_names(name, plain, adapters):
    assert plain_name(name) == plain
    assert is_adapter(name) == adapters


def _count(spec, info):
    """FLOPs by torch's counter, forward and in all."""
    model = build(spec, tokens=info.tokens, image=info.image, seed=0)
    freeze(model, frozen=spec.freeze)
    ids = torch.full((ROWS, LENGTH), 20)
    for row, (rows, columns) in enumerate(GRIDS):
        ids[row, 3 : 3 + rows * columns // 4] = info.tokens.image
    patches = sum(rows * columns for rows, columns in GRIDS)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        hidden = model.model(
            input_ids=ids,
            position_ids=torch.arange(LENGTH).expand(3, ROWS, LENGTH),
            pixel_values=torch.randn(patches, 3 * 8 * 8),
            image_grid_thw=torch.tensor([[1, *grid] for grid in GRIDS]),
            attention_mask=None,
            use_cache=False,
        ).last_hidden_state
        logits = model.lm_head(hidden[0, :LABELS])
        forward = counter.get_total_flops()
        logits.logsumexp(-1).sum().backward()
    return forward, counter.get_total_flops()


@pytest.mark.parametrize(
    ("lora", "freeze"),
    [
        (LoraSpec(rank=4), ()),
        (LoraSpec(rank=4), ("vision", "connector")),
        (LoraSpec(rank=4, targets=("*.self_attn.*",)), ("vision", "connector")),
        (LoraSpec(rank=2, towers=("vision", "language")), ()),
        (LoraSpec(rank=2, towers=("vision",)), ("connector", "language")),
    ],
)
def test_flops_equal_torchs_count(corpus, lora, freeze):
    info = read_processor_info(corpus.processor)
    sizes = TINY_MODEL.sizes | {"text": TINY_MODEL.sizes["text"] | {"num_key_value_heads": 2}}
    spec = ModelSpec(sizes=sizes, lora=lora, freeze=freeze)
    forward, both = _count(spec, info)
    counts = BatchCounts.of(
        [LENGTH] * ROWS,
        image_patches=[rows * columns for rows, columns in GRIDS],
        num_head_tokens=LABELS,
    )
    shape = inspect(spec)
    assert forward_flops(shape, counts=counts).total == pytest.approx(forward, rel=1e-9)
    assert train_flops(shape, counts=counts) == pytest.approx(both, rel=0.01)
