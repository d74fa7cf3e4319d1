"""Rows of the page's tables against sums and boundaries worked out by hand."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from diptych.core.records import Buckets, DdpOptions, Layout, MemoryOptions
from diptych.report import tables
from diptych.report.examples import pick
from diptych.report.steps import Steps, read_steps

from .conftest import LAYOUT, Finished

BUCKETS = Buckets(areas_px=(6_000, 9_000), aspects=(0.9, 2.0))


def test_lengths(finished: Finished) -> None:
    splits, counts = tables.cost_rows(
        finished.manifest, sample_costs=finished.sample_costs, buckets=BUCKETS
    )
    # Of 12 rows in turn 8 have one image (60 tokens), 2 two (80), 2 none (40).
    train = splits[0]
    assert (train.name, train.num_samples, train.num_images) == ("train", 96, 8 * (8 + 2 * 2))
    assert train.max_tokens == 80
    assert train.median_tokens == 60
    assert sum(counts["train"].values()) == 96
    assert counts["train"][0] == 16, "every sixth sample has no image"


def test_bucket_rows_join_counts_and_scores(finished: Finished) -> None:
    _, counts = tables.cost_rows(
        finished.manifest, sample_costs=finished.sample_costs, buckets=BUCKETS
    )
    rows = tables.bucket_rows(finished.scores, buckets=BUCKETS, counts=counts)
    assert [row["bucket"] for row in rows] == sorted({row["bucket"] for row in rows})
    assert sum(row["num_train"] for row in rows) == 96
    assert sum(row["num_heldout"] for row in rows) == 24
    scored = {row["bucket"]: row["exact"] for row in rows if row["exact"]}
    assert {bucket: interval.value for bucket, interval in scored.items()} == {
        0: 1.0,
        2: 0.97,
        9: 0.82,
    }


def test_kinds_that_gain_nothing_from_images_are_marked(finished: Finished) -> None:
    gains = {row["kind"]: row["gains"] for row in tables.score_rows(finished.scores)}
    assert gains == {"read": True, "all": True, "compare": True, "count": True, "text": False}


def test_questions_name_their_images(finished: Finished) -> None:
    examples = pick(finished.predictions, finished.manifest, finished.shards)
    rows = examples.to_pylist()
    rows[0] |= {"question": "<image>\n<image>Which is larger?", "images": [b"", b""]}
    rows[0]["image_types"] = ["", "image/png"]
    rows[1] |= {"question": "<image>\nWhat?", "images": [b"x"], "image_types": ["image/png"]}
    found = tables.example_rows(pa.Table.from_pylist(rows[:2], schema=examples.schema))
    assert found[0]["question"] == "[image 1] [image 2] Which is larger?"
    assert found[0]["uris"] == [None, "data:image/png;base64,"]
    assert found[1]["question"] == "What?"
    assert found[1]["uris"] == ["data:image/png;base64,eA=="]


def test_layout_names() -> None:
    assert tables.name_layout(LAYOUT) == "ddp, dp 2, micro-batch 8, fp32 on cpu"
    assert tables.name_layout(Layout(engine="fsdp2", dp=2, shard=4, precision="bf16")) == (
        "fsdp2, dp 2 x shard 4, micro-batch 1, bf16 on cpu"
    )
    assert tables.name_layout(Layout()) == "ddp, one process, micro-batch 1, fp32 on cpu"
    zero = Layout(engine="zero", shard=2, memory=MemoryOptions(recompute="blocks"))
    assert tables.name_layout(zero) == (
        "zero, shard 2, micro-batch 1, fp32 on cpu, zero.stage 2, memory.recompute blocks"
    )


def test_how_an_ordinary_run_ran(finished: Finished) -> None:
    steps = read_steps(Path(finished.run.folder))
    rows = dict(tables.how_rows(LAYOUT, run=finished.run, steps=steps))
    assert rows["mathematics"] == "that of one process"
    assert rows["skipped steps"].startswith(f"{finished.run.num_skipped} of ")
    assert set(rows) == {"mathematics", "skipped steps"}


def test_what_was_skipped_scaled_and_compiled_is_said(finished: Finished) -> None:
    ordinary = read_steps(Path(finished.run.folder)).records[:3]
    first, second, third = ordinary
    steps = Steps(
        (
            first.model_copy(update={"skipped": True, "loss_scale": 65536.0, "num_recompiles": 1}),
            second.model_copy(
                update={"skipped": True, "loss_scale": 32768.0, "nonfinite": "rank 0: it was so"}
            ),
            third.model_copy(update={"loss_scale": 16384.0, "num_recompiles": 4}),
        )
    )
    run = finished.run.model_copy(update={"num_skipped": 2, "num_steps": 3})
    layout = Layout(dp=2, precision="fp16", ddp=DdpOptions(compression="fp16"))
    assert tables.how_rows(layout, run=run, steps=steps) == [
        ("mathematics", "gradients are sent compressed (fp16)"),
        ("skipped steps", "2 of 3; rank 0: it was so"),
        ("loss scale", "16384 in the last step, from 65536"),
        ("recompiles", "4 in the last attempt"),
    ]


def test_plan_is_split(finished: Finished) -> None:
    able, refused = tables.plan_rows(finished.plan)
    assert [entry.refused for entry in able] == [None] * 3
    assert [entry.layout.precision for entry in refused] == ["bf16"]
    found = tables.predicted(finished.plan, layout=LAYOUT)
    assert found is not None
    assert found.step_s == 0.31
    assert tables.predicted(finished.plan, layout=Layout(dp=7)) is None
