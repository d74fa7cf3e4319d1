"""On a GPU every kernel that it has computes what sdpa does, forward and backward, row by row.

`make gpu-check` runs these with the system's own torch; a kernel that the machine lacks is skipped
with the reason.
"""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.gpu

NUM_TOKENS, IMAGE = 512, 5
TOLERANCE = 2e-2


@pytest.fixture(autouse=True)
def gpu():
    import torch

    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")


def _model(kernel):
    """A tiny decoder with a tower, in bf16, whose decoder computes attention with a kernel."""
    import torch

    from diptych.core.records import ImageSettings, TokenIds
    from diptych.model.assemble import build
    from diptych.model.attention import kernels
    from tests.conftest import TINY_MODEL

    tokens = TokenIds(
        num_tokens=512, pad=0, eos=1, image=IMAGE, video=6, vision_start=3, vision_end=4
    )
    image = ImageSettings(patch_px=8, merge=2, temporal_patch=1, min_area_px=256, max_area_px=65536)
    model = build(TINY_MODEL, tokens=tokens, image=image, seed=0)
    kernels.use(model, kernel=kernel)
    return torch.nn.Module.to(model, "cuda")


def _skip_without(kernel):
    import torch

    from diptych.core.packages import missing_kernels
    from diptych.shape.attention import Situation, objection

    situation = Situation(
        device="cuda",
        dtype="bf16",
        head_width=16,
        capability=torch.cuda.get_device_capability(),
        missing=missing_kernels(tries_import=True),
    )
    found = objection(kernel, situation)
    if found:
        pytest.skip(found.reason)


def _inputs(*, neighbour):
    """Two packed rows of three samples and padding; the second sample is drawn from a seed."""
    import torch

    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(10, 500, (2, NUM_TOKENS), generator=draw)
    segments = torch.zeros((2, NUM_TOKENS), dtype=torch.int32)
    positions = torch.zeros((3, 2, NUM_TOKENS), dtype=torch.int64)
    for segment, (start, end) in enumerate([(0, 150), (150, 333), (333, 480)], start=1):
        segments[:, start:end] = segment
        positions[:, :, start:end] = torch.arange(end - start)
    other = torch.Generator().manual_seed(neighbour)
    ids[:, 150:333] = torch.randint(10, 500, (2, 183), generator=other)
    # An image of one token at the end of the padding, as in a micro-batch without images.
    ids[0, -1] = IMAGE
    labels = torch.where((segments == 3) | (segments == 1), ids, -100)
    labels[:, [0, 333]] = -100
    return {
        "input_ids": ids.cuda(),
        "labels": labels.cuda(),
        "position_ids": positions.cuda(),
        "pixel_values": torch.zeros((4, 192)).cuda(),
        "grid_thw": torch.tensor([[1, 2, 2]]).cuda(),
        "source_ids": torch.zeros((2, NUM_TOKENS), dtype=torch.int16).cuda(),
        "segment_ids": segments.cuda(),
    }


def _loss_and_gradient(kernel, *, neighbour=1):
    import torch

    from diptych.train.step import LossModule

    model = _model(kernel)
    module = LossModule(model).train()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss, _ = module(**_inputs(neighbour=neighbour))
    loss.backward()
    gradient = torch.cat(
        [each.grad.flatten().float() for each in model.parameters() if each.grad is not None]
    )
    return loss.item(), gradient


@pytest.mark.parametrize("kernel", ["flex", "flash_2", "flash_3", "flash_4"])
def test_it_computes_what_sdpa_does(kernel):
    _skip_without(kernel)
    expected, wanted = _loss_and_gradient("sdpa")
    found, gradient = _loss_and_gradient(kernel)
    assert found == pytest.approx(expected, rel=TOLERANCE)
    assert (gradient - wanted).norm() <= 5 * TOLERANCE * wanted.norm()


@pytest.mark.parametrize("kernel", ["sdpa", "flex", "flash_2", "flash_3", "flash_4"])
def test_a_neighbour_changes_no_loss(kernel):
    """The labels are those of the first and the third sample; the second one changes."""
    _skip_without(kernel)
    first, _ = _loss_and_gradient(kernel, neighbour=1)
    other, _ = _loss_and_gradient(kernel, neighbour=2)
    assert first == pytest.approx(other, rel=1e-6)


def test_gemma3s_block_masks_compute_what_its_dense_ones_do():
    import torch
    from torch.nn.attention.flex_attention import flex_attention
    from torch.nn.functional import scaled_dot_product_attention

    from diptych.model.attention.masks import MaskRule, blocks, dense

    _skip_without("flex")
    rule = MaskRule(windows={"all": None, "window": 100}, image_token_id=IMAGE)
    draw = torch.Generator().manual_seed(0)
    ids = torch.where(torch.rand((2, NUM_TOKENS), generator=draw) < 0.8, IMAGE, 1).cuda()
    segments = (torch.arange(NUM_TOKENS) // 200).expand(2, -1).cuda()
    given = {"input_ids_BS": ids, "segment_ids_BS": segments}
    query, key, value = (torch.randn((2, 2, NUM_TOKENS, 64)).cuda() for _ in range(3))
    compiled = torch.compile(flex_attention)
    masks = dense(rule, **given)
    for kind, made in blocks(rule, **given).items():
        found = compiled(query, key, value, block_mask=made)
        expected = scaled_dot_product_attention(query, key, value, attn_mask=masks[kind])
        torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)
