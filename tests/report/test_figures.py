"""Figures show the numbers that were measured, in an order that a reader expects."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from diptych.report.figures import (
    MAX_POINTS,
    curves,
    loss_curve,
    order_kinds,
    plot,
    smooth,
    source_curves,
    vision_curve,
    waste_curves,
)
from diptych.report.steps import Steps, read_steps

from .conftest import Finished
from .logs import write_steps


def test_loss_curve_has_every_step(finished: Finished) -> None:
    records = write_steps(Path(finished.run.folder), num_steps=120)
    loss, _ = plot(finished.run, finished.scores)
    traces = {trace.name: trace for trace in loss.data}
    assert list(traces["training"].x) == list(range(1, 121))
    assert list(traces["training"].y) == [record.loss for record in records]
    assert list(traces["held out"].x) == list(range(12, 121, 12))
    assert list(traces["held out"].y) == [
        record.heldout_loss for record in records if record.heldout_loss is not None
    ]


def test_unmeasured_heldout_loss_has_no_trace(finished: Finished) -> None:
    folder = Path(finished.run.folder)
    records = write_steps(folder, num_steps=120)
    text = "".join(
        record.model_copy(update={"heldout_loss": None}).model_dump_json() + "\n"
        for record in records
    )
    (folder / "steps.jsonl").write_text(text, encoding="utf-8")
    assert [trace.name for trace in loss_curve(read_steps(folder)).data] == [
        "training",
        "training, smoothed",
    ]


def test_long_curve_is_thinned(tmp_path: Path) -> None:
    write_steps(tmp_path, num_steps=2_500)
    steps = read_steps(tmp_path)
    figures = {"loss": loss_curve(steps), **curves(steps, max_grad_norm=1.0)}
    for name, figure in figures.items():
        assert len(figure.data[0].x) <= MAX_POINTS, name
        assert figure.data[0].x[-1] == 2_500, name


def test_step_time_adds_up(finished: Finished) -> None:
    steps = read_steps(Path(finished.run.folder))
    waiting, computing = curves(steps, max_grad_norm=1.0)["time"].data
    np.testing.assert_allclose(np.add(waiting.y, computing.y), steps.column("step_s"))


def test_sources_have_curves_where_they_were_measured(finished: Finished) -> None:
    records = read_steps(Path(finished.run.folder)).records
    changed = [
        record.model_copy(
            update={
                "loss_by_source": {"<b>a</b>": 2.0, "b": 3.0} if record.step % 2 else {"b": 3.0},
                "heldout_loss_by_source": {"b": 4.0} if record.step == 60 else {},
            }
        )
        for record in records
    ]
    found = source_curves(Steps(tuple(changed)), sources=("<b>a</b>", "b", "never"))
    names = [trace.name for trace in found.data]
    assert names == ["&lt;b&gt;a&lt;/b&gt;", "b", "b, held out"]
    assert set(found.data[0].y) == {2.0}
    assert (list(found.data[2].x), list(found.data[2].y)) == ([60], [4.0])


def test_waste_has_what_was_measured(finished: Finished) -> None:
    records = read_steps(Path(finished.run.folder)).records
    padding, idle = waste_curves(Steps(records)).data
    assert padding.y[-1] == pytest.approx(4)
    assert np.isnan(idle.y[0]), "the first step did not measure it"
    assert idle.y[-1] == pytest.approx(2)
    bare = tuple(record.model_copy(update={"idle_fraction": None}) for record in records)
    assert [trace.name for trace in waste_curves(Steps(bare)).data] == ["padding"]


def test_the_contrastive_loss_has_a_curve_where_it_was_made(finished: Finished) -> None:
    records = read_steps(Path(finished.run.folder)).records
    assert not vision_curve(Steps(records)).data
    changed = tuple(each.model_copy(update={"vision_loss": each.step / 7}) for each in records)
    measured, _ = vision_curve(Steps(changed)).data
    assert measured.name == "loss/vision"
    assert list(measured.y) == [each.step / 7 for each in records]


def test_score_bars(finished: Finished) -> None:
    _, bars = plot(finished.run, finished.scores)
    model, blind = bars.data
    assert list(model.y) == ["read", "all", "compare", "count", "text"]
    assert model.x[0] == pytest.approx(96.3)
    assert blind.x[0] == pytest.approx(3.1)
    interval = finished.scores.exact_match["read"]
    assert model.x[0] + model.error_x.array[0] == pytest.approx(100 * interval.high)
    assert model.x[0] - model.error_x.arrayminus[0] == pytest.approx(100 * interval.low)


def test_kind_names_are_text(finished: Finished) -> None:
    kind = "<a href='x'>read</a>"
    scores = finished.scores.model_copy(
        update={"exact_match": {kind: finished.scores.exact_match["read"]}}
    )
    assert order_kinds(scores) == [kind]
    _, bars = plot(finished.run, scores)
    assert "<" not in bars.data[0].y[0]


def test_smooth_is_the_unbiased_moving_average() -> None:
    values = np.random.default_rng(3).normal(size=50)
    values[[0, 7, 8]] = np.nan
    expected = pd.Series(values).ewm(halflife=6.0, adjust=True, ignore_na=True).mean()
    np.testing.assert_allclose(smooth(values, half_life=6.0), expected.to_numpy())
