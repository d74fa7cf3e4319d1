"""A kernel is the decoder's alone, and all ranks run the same."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from diptych.core.errors import LayoutError
from diptych.core.records import Layout
from diptych.model.assemble import build
from diptych.model.attention import kernels

ALL = ("sdpa", "flex", "flash_2", "flash_3", "flash_4")
SIZES = {"text": {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 64}}


def _choose(layout, *, gather=lambda able: np.array([able], dtype=np.float64)):
    return kernels.choose_with_others(
        layout,
        model_family="qwen3_vl",
        sizes=SIZES,
        is_packed=True,
        device=torch.device(layout.device),
        gather=gather,
    )


@pytest.fixture
def hopper(monkeypatch):
    """A GPU of this capability with every package."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(kernels, "missing_kernels", lambda *, tries_import: {})
    return Layout(device="cuda", precision="bf16")


def test_a_cpu_computes_with_sdpa_and_refuses_others():
    assert _choose(Layout()).kernel == "sdpa"
    with pytest.raises(LayoutError, match=r"attention is flash_2.*GPUs alone"):
        _choose(Layout(attention="flash_2"))


def test_a_rank_takes_what_it_has(hopper):
    assert _choose(hopper).kernel == "flash_3"


def test_ranks_agree_on_what_runs_on_all(hopper):
    def gather(able):
        assert able == [True] * 5
        # The third rank has no flash_3, which is the fourth of them.
        return np.array([able, able, [1, 1, 1, 0, 1]], dtype=np.float64)

    choice = _choose(hopper, gather=gather)
    assert choice.kernel == "flash_4"
    assert choice.passed_over == {"flash_3": "rank 2 cannot run it"}
    with pytest.raises(LayoutError, match=r"rank 2 cannot run it.*Make the nodes alike"):
        _choose(hopper.model_copy(update={"attention": "flash_3"}), gather=gather)


@pytest.mark.parametrize("kernel", ALL)
def test_the_vision_tower_keeps_sdpa(kernel, model_spec, token_ids, image_settings):
    model = build(model_spec, tokens=token_ids, image=image_settings, seed=0)
    kernels.use(model, kernel=kernel)
    assert model.config.vision_config._attn_implementation == "sdpa"
    name = model.config.text_config._attn_implementation
    assert (name == "sdpa") == (kernel == "sdpa")
    # A config that is written names none.
    assert "attn" not in model.config.to_json_string()


def test_attention_in_fp32_comes_after_the_choice(model_spec, token_ids, image_settings):
    model = build(model_spec, tokens=token_ids, image=image_settings, seed=0)
    kernels.use(model, kernel="sdpa")
    kernels.keep_fp32(model)
    seen = kernels.seen_by(
        model,
        rule=kernels.MaskRule(),
        input_ids_BS=torch.zeros((1, 3), dtype=torch.int64),
        segment_ids_BS=torch.tensor([[1, 2, 2]]),
    )
    assert seen.mask.shape == (1, 1, 3, 3)
    assert seen.keywords == {}
