"""The choice of a kernel over a table of situations, each expectation worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from diptych.core.errors import LayoutError
from diptych.core.records import Layout, MemoryOptions, MixedPrecision
from diptych.shape.attention import Choice, Situation, choose, objection, situation_of

NO_PACKAGES = {
    "flash_2": "flash-attn is not installed",
    "flash_3": "flash-attn-3 is not installed",
    "flash_4": "flash-attn-4 is not installed",
}
AMPERE, ADA, HOPPER, BLACKWELL = (8, 0), (8, 9), (9, 0), (10, 0)


def _gpu(capability, **changes):
    return Situation(
        **{"device": "cuda", "dtype": "bf16", "capability": capability, "missing": {}, **changes}
    )


CPU = Situation(device="cpu", dtype="fp32")


@pytest.mark.parametrize(
    ("situation", "kernel"),
    [
        (CPU, "sdpa"),
        (replace(CPU, dtype="bf16", is_packed=True, missing={}), "sdpa"),
        # One sample a row: torch's own sdpa is Flash Attention 2.
        (_gpu(AMPERE), "sdpa"),
        (_gpu(ADA), "sdpa"),
        (_gpu(HOPPER), "flash_3"),
        (_gpu(HOPPER, missing={"flash_3": "no"}), "flash_4"),
        (_gpu(HOPPER, missing=NO_PACKAGES), "sdpa"),
        (_gpu(BLACKWELL), "flash_4"),
        # Several samples a row.
        (_gpu(AMPERE, is_packed=True), "flash_2"),
        (_gpu(AMPERE, is_packed=True, missing=NO_PACKAGES), "flex"),
        (_gpu(HOPPER, is_packed=True), "flash_3"),
        (_gpu(HOPPER, is_packed=True, missing={"flash_3": "no", "flash_4": "no"}), "flash_2"),
        (_gpu(BLACKWELL, is_packed=True), "flash_4"),
        (_gpu(BLACKWELL, is_packed=True, missing={"flash_4": "no"}), "flash_2"),
        (_gpu((7, 5), is_packed=True, dtype="fp16"), "sdpa"),
        # What Flash Attention does not compute.
        (_gpu(HOPPER, dtype="fp32"), "sdpa"),
        (_gpu(HOPPER, dtype="fp32", is_packed=True), "flex"),
        (_gpu(HOPPER, dtype="fp16"), "flash_3"),
        (_gpu(HOPPER, holds_fp32=True, is_packed=True), "sdpa"),
        (_gpu(HOPPER, sees_ahead=True), "flex"),
        (_gpu(HOPPER, sees_ahead=True, is_packed=True, missing=NO_PACKAGES), "flex"),
        (_gpu((7, 0), sees_ahead=True, dtype="fp16"), "sdpa"),
        # Heads: 256 wide at most, flash_4 128.
        (_gpu(BLACKWELL, head_width=256), "sdpa"),
        (_gpu(BLACKWELL, head_width=256, is_packed=True), "flash_2"),
        (_gpu(AMPERE, head_width=264, is_packed=True), "flex"),
        (_gpu(AMPERE, head_width=100, is_packed=True), "flex"),
        (_gpu(HOPPER, has_dropout=True), "sdpa"),
        (_gpu(HOPPER, has_dropout=True, is_packed=True), "flash_2"),
        (_gpu(AMPERE, is_packed=True, keeps_operators=True, missing=NO_PACKAGES), "sdpa"),
    ],
)
def test_auto_takes(situation, kernel):
    choice = choose("auto", situation=situation)
    assert choice.kernel == kernel
    assert objection(kernel, situation) is None


@pytest.mark.parametrize(
    ("wanted", "situation", "message"),
    [
        ("flex", CPU, r"is flex, and it has no backward pass on a CPU.*Train on a GPU"),
        ("flash_2", CPU, "runs on GPUs alone"),
        ("flash_2", _gpu(HOPPER, sees_ahead=True), "see each other.*flex or sdpa"),
        ("flash_3", _gpu(HOPPER, dtype="fp32"), "the decoder in fp32.*precision to bf16"),
        ("flash_3", _gpu(HOPPER, holds_fp32=True), "take attention out|Take attention out"),
        ("flex", _gpu(HOPPER, holds_fp32=True), "keep_fp32 holds attention in fp32"),
        ("flex", _gpu(HOPPER, keeps_operators=True), "recompute to blocks"),
        ("flex", _gpu(HOPPER, has_dropout=True), "attention_dropout"),
        ("flex", _gpu((7, 5)), r"capability is 7\.5, it takes 8\.0 or later"),
        ("flash_3", _gpu(AMPERE), r"capability is 8\.0, it takes 9\.x alone"),
        ("flash_3", _gpu(BLACKWELL), r"capability is 10\.0, it takes 9\.x alone"),
        ("flash_4", _gpu(ADA), r"8\.9, it takes 9\.0 or later"),
        ("flash_4", _gpu(HOPPER, head_width=256), "256 wide.*up to 128"),
        ("flash_2", _gpu(HOPPER, head_width=20), "20 wide"),
        ("flash_2", _gpu(HOPPER, missing=NO_PACKAGES), "flash-attn is not installed"),
    ],
)
def test_an_explicit_choice_that_cannot_run_is_refused(wanted, situation, message):
    with pytest.raises(LayoutError, match=message):
        choose(wanted, situation=situation)


def test_an_explicit_choice_that_can_run_is_taken():
    assert choose("flash_2", situation=_gpu(HOPPER)).kernel == "flash_2"
    assert choose("sdpa", situation=_gpu(HOPPER, is_packed=True)).kernel == "sdpa"


def test_what_is_not_known_speaks_against_nothing():
    """The planner does not know packages, and of some GPUs not the compute capability."""
    unknown = Situation(device="cuda", dtype="bf16")
    assert all(objection(kernel, unknown) is None for kernel in ("flex", "flash_3", "flash_4"))


def test_a_rank_that_cannot_decides_for_all():
    situation, elsewhere = _gpu(HOPPER), {"flash_3": "rank 3 cannot run it"}
    choice = choose("auto", situation=situation, elsewhere=elsewhere)
    assert choice.kernel == "flash_4"
    assert choice.passed_over == elsewhere
    with pytest.raises(LayoutError, match="rank 3 cannot run it"):
        choose("flash_3", situation=situation, elsewhere=elsewhere)


def test_a_choice_says_what_it_passed_over():
    choice = choose("auto", situation=_gpu(AMPERE, is_packed=True, missing={"flash_2": "broken"}))
    assert str(choice) == (
        "flex, for rows that hold several samples; "
        "not flash_3: the GPU's compute capability is 8.0, it takes 9.x alone; "
        "not flash_4: the GPU's compute capability is 8.0, it takes 9.0 or later; "
        "not flash_2: broken"
    )
    assert str(choose("auto", situation=CPU)) == "sdpa, on a CPU"
    assert str(Choice("flex", "so")) == "flex, so"


def test_a_situation_is_read_from_layout_and_sizes():
    layout = Layout(
        device="cuda",
        precision="bf16",
        mixed_precision=MixedPrecision(towers={"language": "fp16"}, keep_fp32=("attention",)),
        memory=MemoryOptions(recompute="operators"),
    )
    found = situation_of(
        layout,
        model_family="gemma3",
        sizes={"text": {"hidden_size": 64, "num_attention_heads": 4, "attention_dropout": 0.1}},
        is_packed=True,
        capability=(9, 0),
        missing=None,
    )
    assert found == Situation(
        device="cuda",
        dtype="fp16",
        holds_fp32=True,
        keeps_operators=True,
        sees_ahead=True,
        is_packed=True,
        head_width=16,
        has_dropout=True,
        capability=(9, 0),
    )
    plain = situation_of(
        Layout(),
        model_family="qwen3_vl",
        sizes={"text": {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 32}},
        is_packed=False,
        capability=None,
        missing=None,
    )
    assert plain == Situation(device="cpu", dtype="fp32", head_width=32)
