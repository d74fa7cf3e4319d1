"""What batches waste, against sums worked out by hand and a second count over the assignment."""

from __future__ import annotations

import numpy as np
import pytest

from diptych.core.records import Buckets, ScheduleSpec
from diptych.data.costs import Costs, ShardCosts, load_costs
from diptych.data.schedule.assign import assign
from diptych.data.schedule.schedule import Schedule
from diptych.report.balance import measure_balance

from .conftest import Finished

BUCKETS = Buckets(areas_px=(), aspects=())


def costs_of(num_tokens: list[int]) -> Costs:
    """Make the costs of text-only samples in one shard."""
    tokens = np.array(num_tokens, dtype=np.int32)
    zeros = np.zeros(len(tokens), dtype=np.int32)
    shard = ShardCosts(
        num_tokens=tokens,
        num_label_tokens=tokens,
        num_image_tokens=zeros,
        num_patches=zeros,
        num_images=zeros,
        area_px=zeros.astype(np.int64),
        aspect=zeros.astype(np.float32),
        usable=np.ones(len(tokens), dtype=bool),
    )
    count = len(tokens)
    summary = {
        "num_samples": count,
        "ok": count,
        "num_tokens": int(tokens.sum()),
        "squared_tokens": int((tokens.astype(np.int64) ** 2).sum()),
        "max_tokens": int(tokens.max()),
    }
    names = ("no_label", "special_token", "unencodable", "damaged", "num_label_tokens")
    names = (*names, "num_image_tokens", "num_patches", "max_patches")
    return Costs(
        manifest_sha256="m",
        processor_sha256="p",
        split="train",
        sources=("text",),
        shard_sources=np.zeros(1, dtype=np.int64),
        summary={
            name: np.array([value], dtype=np.int64)
            for name, value in {**dict.fromkeys(names, 0), **summary}.items()
        },
        read=lambda _: shard,
    )


def test_two_lengths_by_hand() -> None:
    """Half of the samples are 10 long, half 30: a sorted schedule pads nothing."""
    spec = ScheduleSpec(global_batch=64, group=8, max_row_tokens=64)
    found = measure_balance(costs_of([10, 30] * 512), buckets=BUCKETS, spec=spec)
    assert found.num_steps == 16
    wastes = {waste.name: waste for waste in found.wastes}
    assert list(wastes) == ["padding", "idle, 8 ranks", "idle, 64 ranks"]
    assert wastes["padding"].after == 0
    # Of 8 random samples nearly all micro-batches hold a long one: 1 - 20 / 30.
    assert wastes["padding"].before == pytest.approx(1 / 3, abs=0.02)
    for name in ("idle, 8 ranks", "idle, 64 ranks"):
        assert wastes[name].after < 0.05 < wastes[name].before
    assert found.notes == ()


def test_the_schedule_is_the_one_that_training_uses(finished: Finished) -> None:
    costs = load_costs(finished.sample_costs, manifest=finished.manifest, split="train")
    spec = ScheduleSpec(global_batch=16, group=4)
    found = measure_balance(costs, buckets=BUCKETS, spec=spec)
    schedule = Schedule(costs, buckets=BUCKETS, spec=spec)
    tokens = costs.column("num_tokens")
    held = padded = 0
    mean = most = 0.0
    for number in range(schedule.num_steps(0)):
        rows = schedule.rows(0, number)
        loads = []
        for rank in range(8):
            mine = assign(
                rows,
                costs=schedule.weigh(rows),
                world_size=8,
                rank=rank,
                micro_batch=2,
                group=4,
            )
            lengths = [[int(tokens[row].sum()) for row in micro if len(row)] for micro in mine]
            held += sum(sum(each) for each in lengths)
            padded += sum(len(each) * max(each, default=0) for each in lengths)
            loads.append(sum(schedule.weigh(micro).sum() for micro in mine))
        mean, most = mean + sum(loads) / 8, most + max(loads)
    padding, idle = found.wastes
    assert padding.after == pytest.approx(1 - held / padded)
    assert idle.after == pytest.approx(1 - mean / most)
    assert found.notes == ("64 ranks: not measured, a batch has 16 rows",)


def test_packed_rows_are_padded_to_their_full_width(finished: Finished) -> None:
    costs = load_costs(finished.sample_costs, manifest=finished.manifest, split="train")
    spec = ScheduleSpec(mode="pack", global_batch=8, max_row_tokens=128)
    padding = measure_balance(costs, buckets=BUCKETS, spec=spec).wastes[0]
    schedule = Schedule(costs, buckets=BUCKETS, spec=spec)
    batches = [schedule.rows(0, number) for number in range(schedule.num_steps(0))]
    num_rows = sum(len(row) > 0 for batch in batches for row in batch)
    total = sum(int(costs.take(batch.samples).num_tokens.sum()) for batch in batches)
    assert padding.after == pytest.approx(1 - total / (128 * num_rows))


def test_no_schedule_says_why(finished: Finished) -> None:
    costs = load_costs(finished.sample_costs, manifest=finished.manifest, split="train")
    found = measure_balance(costs, buckets=BUCKETS, spec=ScheduleSpec(max_row_tokens=50))
    assert found.wastes == ()
    assert "max_row_tokens" in found.refused


def test_samples_left_out_are_noted(finished: Finished) -> None:
    costs = load_costs(finished.sample_costs, manifest=finished.manifest, split="train")
    spec = ScheduleSpec(global_batch=64, max_row_tokens=70, over_long="leave_out")
    assert measure_balance(costs, buckets=BUCKETS, spec=spec).notes == (
        "over_long: 16 samples left out",
    )
