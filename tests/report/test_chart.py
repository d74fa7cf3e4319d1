"""The figures of the data have the numbers of the data."""

from __future__ import annotations

import json

import numpy as np
import pytest

from diptych.core.records import Buckets, ScheduleSpec
from diptych.data.bucket import bucket_of
from diptych.data.costs import load_costs
from diptych.report.balance import Balance
from diptych.report.chart import chart, draw_grid, draw_lengths, draw_waste
from diptych.report.tally import LENGTH_EDGES, SourceTally

from .conftest import Finished

BUCKETS = Buckets(areas_px=(6_000, 9_000), aspects=(0.9, 2.0))
SPEC = ScheduleSpec(global_batch=16, group=4, max_row_tokens=100)


def test_figures_add_up(finished: Finished) -> None:
    grid, lengths, aspects, waste = chart(
        finished.manifest, sample_costs=finished.sample_costs, buckets=BUCKETS, schedule=SPEC
    )
    costs = load_costs(finished.sample_costs, manifest=finished.manifest, split="train")
    numbers = bucket_of(BUCKETS, costs.column("area_px"), costs.column("aspect"))
    counted = np.bincount(numbers, minlength=10)
    cells, text_only = grid.data
    assert [[int(cell or 0) for cell in row] for row in cells.text] == (
        counted[1:].reshape(3, 3).tolist()
    )
    assert [list(row) for row in text_only.text] == [["16"]]
    assert list(cells.y) == ["under 6,000 px", "6,000 to 9,000 px", "from 9,000 px"]
    assert sum(lengths.data[0].y) == 96
    assert sum(aspects.data[0].y) == 80
    assert [bar.name for bar in waste.data] == ["random batches", "this schedule"]
    for figure in (grid, lengths, aspects, waste):
        assert "bdata" not in figure.to_json(), "kedro-viz reads plain lists"


def test_lines_mark_the_cuts_and_the_longest_row(finished: Finished) -> None:
    far = SPEC.model_copy(update={"max_row_tokens": 1_000})
    _, lengths, aspects, _ = chart(
        finished.manifest, sample_costs=finished.sample_costs, buckets=BUCKETS, schedule=far
    )
    assert not lengths.layout.shapes
    assert [shape.x0 for shape in aspects.layout.shapes] == [0.9, 2.0]
    near = SPEC.model_copy(update={"max_row_tokens": 81})
    _, lengths, _, _ = chart(
        finished.manifest, sample_costs=finished.sample_costs, buckets=BUCKETS, schedule=near
    )
    assert [shape.x0 for shape in lengths.layout.shapes] == [81]


def test_an_empty_split_has_empty_figures(finished: Finished) -> None:
    costs = json.loads((finished.sample_costs / "costs.json").read_text())
    manifest = finished.manifest.model_copy(update={"shards": finished.manifest.shards[1:]})
    text = json.dumps(costs | {"manifest_sha256": manifest.sha256})
    (finished.sample_costs / "costs.json").write_text(text, encoding="utf-8")
    _, lengths, _, waste = chart(
        manifest, sample_costs=finished.sample_costs, buckets=BUCKETS, schedule=SPEC
    )
    assert not sum(sum(bar.y) for bar in lengths.data)
    assert lengths.layout.annotations[0].text == "No sample"
    assert "no sample" in waste.layout.annotations[0].text.replace("<br>", " ")


def test_many_sources_are_summed_up() -> None:
    sources = [
        SourceTally(
            name=f"<i>{number}</i>",
            lengths=np.bincount([20], minlength=len(LENGTH_EDGES)) * (number + 1),
            aspects=np.zeros(1),
            buckets=np.zeros(1, dtype=np.int64),
        )
        for number in range(12)
    ]
    bars = draw_lengths(sources, max_row_tokens=64).data
    assert len(bars) == 8
    assert bars[-1].name == "all others"
    assert sum(bars[-1].y) == 1 + 2 + 3 + 4 + 5
    assert not any("<" in bar.name for bar in bars)


def test_no_buckets_are_one_class() -> None:
    source = SourceTally("a", np.zeros(1), np.zeros(1), np.array([3, 4]))
    cells, text_only = draw_grid([source], buckets=Buckets(areas_px=(), aspects=())).data
    assert [list(row) for row in cells.text] == [["4"]]
    assert [list(row) for row in text_only.text] == [["3"]]


@pytest.mark.parametrize("words", ["<b>no</b>", "no " * 60])
def test_a_refused_schedule_is_said(words: str) -> None:
    text = draw_waste(Balance(refused=words)).layout.annotations[0].text
    assert "<b>" not in text
    assert max(map(len, text.split("<br>"))) <= 80
