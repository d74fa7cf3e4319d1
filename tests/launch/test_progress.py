"""What a person sees of a run: its options, what departs, and every step that changed nothing."""

from __future__ import annotations

import pytest

from diptych.core.records import (
    DdpOptions,
    Layout,
    LossScale,
    MemoryOptions,
    MixedPrecision,
    StepRecord,
)
from diptych.launch.progress import _Lines, _Remarks, describe_options


def record(step, **fields):
    return StepRecord(
        **{
            "step": step,
            "epoch": 0,
            "loss": 1.25,
            "lr": 1e-3,
            "grad_norm": 1.0,
            "num_rows": 8,
            "num_samples": 8,
            "num_label_tokens": 10,
            "num_text_tokens": 20,
            "num_image_tokens": 20,
            "num_patches": 80,
            "padding_fraction": 0.1,
            "step_s": 0.5,
            "data_s": 0.1,
            "tokens_per_s": 80.0,
            **fields,
        }
    )


def shown(layout, records, capsys):
    lines = _Lines(len(records), log_every=1, remarks=_Remarks(layout))
    for each in records:
        lines.show(each)
    return capsys.readouterr().out.splitlines()


FP16 = Layout(precision="fp16")


def test_the_search_for_a_loss_scale_is_explained(capsys):
    steps = [
        record(1, skipped=True, loss_scale=65536.0, num_skipped=1),
        record(2, skipped=True, loss_scale=32768.0, num_skipped=2),
        record(3, loss_scale=16384.0, num_skipped=2),
    ]
    out = shown(FP16, steps, capsys)
    assert "step 1 overflowed at loss scale 65536: skipped, now 32768" in out
    assert "step 2 overflowed at loss scale 32768: skipped, now 16384" in out
    assert "loss scale 16384  2 skipped" in out[-1]


def test_the_layout_s_own_backoff_and_minimum_count(capsys):
    scale = LossScale(initial=1024, minimum=512, backoff=0.25)
    layout = Layout(precision="fp16", mixed_precision=MixedPrecision(loss_scale=scale))
    out = shown(layout, [record(1, skipped=True, loss_scale=1024.0)], capsys)
    assert out[0] == "step 1 overflowed at loss scale 1024: skipped, now 512"
    out = shown(layout, [record(2, skipped=True, loss_scale=512.0)], capsys)
    assert out[0] == "step 2 overflowed at the smallest loss scale, 512: skipped"


def test_a_step_without_a_scale_is_said_with_what_was_found(capsys):
    why = "rank 1: in micro-batch 2 Linear 'x' made Inf of finite inputs in its forward pass"
    out = shown(Layout(), [record(7, skipped=True, nonfinite=why, num_skipped=1)], capsys)
    assert out[:2] == ["step 7: the gradient was not finite, so no weight has changed", f"  {why}"]


def test_after_many_they_are_only_counted(capsys):
    steps = [record(at, skipped=True, num_skipped=at) for at in range(1, 40)]
    out = shown(Layout(), steps, capsys)
    assert sum("no weight has changed" in line for line in out) == 20
    assert out.count("further steps whose gradient is not finite are only counted") == 1
    assert "39 skipped" in out[-1]


def test_an_ordinary_step_says_no_more_than_before(capsys):
    assert shown(Layout(), [record(1)], capsys) == ["step 1/1  loss 1.2500  80 tokens/s"]


def test_towers_with_rates_of_their_own_are_said(capsys):
    out = shown(Layout(), [record(1, lr_by_tower={"vision": 1.25e-5})], capsys)
    assert out == ["step 1/1  loss 1.2500  80 tokens/s  lr/vision 1.25e-05"]


def test_two_losses_are_told_apart(capsys):
    out = shown(Layout(), [record(1, vision_loss=0.5)], capsys)
    assert out == ["step 1/1  loss/language 1.2500  loss/vision 0.5000  80 tokens/s"]


@pytest.mark.parametrize(("count", "said"), [(None, False), (0, False), (3, True)])
def test_recompiles_are_counted(count, said, capsys):
    out = shown(Layout(), [record(1, num_recompiles=count)], capsys)
    assert ("3 recompiles" in out[-1]) is said


def test_options_and_departures_are_said_at_the_start():
    assert describe_options(Layout()) == []
    layout = Layout(
        dp=2,
        ddp=DdpOptions(compression="powersgd"),
        memory=MemoryOptions(recompute="blocks"),
    )
    assert describe_options(layout) == [
        "  with ddp.compression powersgd, memory.recompute blocks",
        "  departs from one process: gradients are sent compressed (powersgd)",
    ]


def test_saves_that_failed_are_counted(capsys):
    assert "1 failed saves" in shown(Layout(), [record(7, num_failed_saves=1)], capsys)[-1]
