"""What a page shows of runs: curves with as many points as are seen, words, and who it is of."""

from __future__ import annotations

import base64
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from diptych.core.records import Interval, Parity, Scores
from diptych.core.tables import PREDICTIONS
from diptych.dashboard.answers import Evaluation
from diptych.dashboard.charts import CHARTS
from diptych.dashboard.view import Desk
from diptych.dashboard.wanted import Wanted
from tests.dashboard.folders import make_desk, make_observed
from tests.monitor.folders import make_run


def numbers(packed):
    return np.frombuffer(base64.b64decode(packed["bdata"]), dtype=f"<{packed['dtype']}")


@pytest.fixture
def runs(tmp_path):
    make_observed(tmp_path, "aaaa", moved_s=1.7e9)
    make_observed(tmp_path, "bbbbb", num_steps=30, moved_s=1.6e9)
    make_run(tmp_path, "old", moved_s=1.5e9)
    return tmp_path


def ask(*names, **fields):
    chosen = [{"key": f"0/{name}", "color": number} for number, name in enumerate(names)]
    return Wanted.model_validate({"chosen": chosen, **fields})


def figures(desk, wanted):
    return {each.chart.name: each.figure for each in desk.draw(wanted)}


def test_the_list_has_every_run(runs):
    lines = make_desk(runs).lines()
    assert [line["run"] for line in lines] == ["aaaa", "bbbbb", "old"]
    assert (lines[0]["step"], lines[0]["num_steps"], lines[0]["heldout"]) == (40, 60, 2.5)
    assert lines[0]["loss"] == pytest.approx(0.1)


def test_one_run_has_a_colour_per_curve(runs):
    loss = figures(make_desk(runs), ask("aaaa"))["loss"]
    training, heldout, alerts = loss["data"]
    assert numbers(training["x"]).tolist() == list(range(1, 41))
    assert numbers(training["y"])[:2].tolist() == [4.0, 2.0]
    assert numbers(heldout["x"]).tolist() == [10, 20, 30, 40]
    assert training["line"]["color"] != heldout["line"]["color"]
    assert (numbers(alerts["x"]).tolist(), numbers(alerts["y"])[0]) == ([7], np.float32(4 / 7))


def test_several_runs_have_a_colour_each(runs):
    loss = figures(make_desk(runs), ask("aaaa", "bbbbb"))["loss"]
    lines = [trace for trace in loss["data"] if trace["name"].endswith("training")]
    assert [trace["name"] for trace in lines[:2]] == ["aaaa training", "bbbbb training"]
    assert lines[0]["line"]["color"] != lines[1]["line"]["color"]
    assert len(numbers(lines[1]["x"])) == 30


def test_another_attempt_is_marked(runs):
    (mark,) = figures(make_desk(runs), ask("aaaa"))["loss"]["layout"]["shapes"]
    assert mark["x0"] == 21


def test_names_from_data_are_no_markup(runs):
    desk = make_desk(runs)
    drawn = figures(desk, ask("aaaa"))
    names = [trace["name"] for trace in drawn["loss_by_source"]["data"]]
    assert names == ["&lt;b&gt;pages&lt;/b&gt;", "digits"]
    assert "<i>" not in json.dumps(drawn)


def test_what_an_old_run_lacks_is_not_drawn(runs):
    desk = make_desk(runs)
    assert figures(desk, ask("old", tab="speed"))["mfu"] is None
    assert figures(desk, ask("old", tab="speed"))["phases_mean"] is None
    assert figures(desk, ask("old", tab="devices"))["busy"] is None
    assert figures(desk, ask("aaaa", tab="speed"))["mfu"] is not None


def test_a_stack_is_of_the_run_in_focus(runs):
    wanted = ask("old", "aaaa", tab="speed", focus="0/aaaa")
    stack = figures(make_desk(runs), wanted)["phases_most"]["data"]
    assert [trace["name"] for trace in stack] == ["forward", "backward"]
    assert numbers(stack[1]["y"]).tolist() == [0.5] * 40


def test_what_is_in_view_is_drawn(runs):
    desk = make_desk(runs)
    wanted = ask("aaaa", views={"steps": [9.5, 12.5]})
    loss = figures(desk, wanted)["loss"]
    assert numbers(loss["data"][0]["x"]).tolist() == [9, 10, 11, 12, 13]
    assert loss["layout"]["xaxis"]["range"] == [9.5, 12.5]
    assert figures(desk, ask("aaaa"))["loss"]["layout"]["xaxis"] != loss["layout"]["xaxis"]


@pytest.mark.parametrize(("x", "per_step"), [("tokens", 40), ("hours", 0.5 / 3600)])
def test_curves_over_tokens_and_hours(runs, x, per_step):
    loss = figures(make_desk(runs), ask("aaaa", x=x))["loss"]
    steps = np.arange(1, 41)
    assert numbers(loss["data"][0]["x"]) == pytest.approx(steps * per_step)


def test_devices_over_the_clock(runs):
    busy = figures(make_desk(runs), ask("aaaa", tab="devices"))["busy"]
    assert [trace["name"] for trace in busy["data"]] == ["0", "1"]
    assert numbers(busy["data"][1]["y"]).tolist() == [0.75] * 5
    assert numbers(busy["data"][0]["x"])[0] == 1.7e12
    assert busy["layout"]["xaxis"]["type"] == "date"


def test_a_run_of_one_step_can_be_drawn(tmp_path):
    make_observed(tmp_path, "aaaa", num_steps=1)
    desk = make_desk(tmp_path)
    for tab in ("loss", "speed", "devices"):
        assert any(figures(desk, ask("aaaa", tab=tab, x="hours", smooth=11)).values())


def test_settings_that_differ_stand_side_by_side(runs):
    alerts, attempts, settings = make_desk(runs).tell(ask("aaaa", "bbbbb", tab="settings")).tables
    assert settings.columns == ("setting", "aaaa", "bbbbb")
    assert settings.rows == (("identity.seed", "4", "5"),)
    assert [row[2:] for row in alerts.rows] == [("7", "stall", "<i>it</i> stalls")] * 2
    assert attempts.rows == ()


def test_the_word_changes_with_the_files(runs):
    desk = make_desk(runs)
    before = desk.word(ask("aaaa"))
    assert desk.word(ask("aaaa")) == before
    with (runs / "aaaa" / "alerts.jsonl").open("a") as file:
        file.write("{}\n")
    assert desk.word(ask("aaaa")) != before


@pytest.mark.parametrize("key", ["0/../aaaa", "1/aaaa", "/etc", "0/nothing", "0/aaaa/../aaaa"])
def test_a_key_leads_to_listed_runs_only(runs, key):
    desk = make_desk(runs / "..", runs)
    assert desk.runs.find(key) is None or key == "1/aaaa"
    assert make_desk(runs).draw(Wanted(chosen=({"key": key},)))[0].figure is None


@pytest.mark.parametrize("node", ["../node-0", "nothing", "node-0.jsonl"])
def test_a_node_that_was_not_sampled_shows_another(runs, node):
    desk, wanted = make_desk(runs), ask("aaaa", tab="devices", node=node)
    assert desk.node(wanted) == "node-0"
    assert desk.runs.samples(desk.runs.find("0/aaaa"), node=node)[1] == "none"


@pytest.mark.parametrize(
    "fields",
    [
        {"tab": "else"},
        {"x": "loss"},
        {"smooth": 5000000},
        {"chosen": [{"key": "0/a"}] * 9},
        {"chosen": [{"key": "0/a", "color": 99}]},
        {"views": {"steps": [0, float("nan")]}},
        {"path": "/etc/passwd"},
    ],
)
def test_a_page_cannot_ask_for_anything(fields):
    with pytest.raises(ValidationError):
        Wanted.model_validate(fields)


@pytest.fixture
def evaluation(tmp_path):
    folder = tmp_path / "evaluated"
    folder.mkdir()
    found = Evaluation(
        **{name: folder / name for name in ("parity", "scores", "predictions", "examples")}
    )
    interval = {"all": Interval(value=0.5, low=0.1, high=0.9, n=2)}
    parity = Parity(
        release_sha256="r",
        run_id="aaaa",
        max_abs=0,
        max_rel=0,
        tolerance=1e-5,
        num_samples=1,
        num_logits=1,
        missing_keys=(),
        extra_keys=(),
        tokens_equal=True,
        passed=True,
    )
    scores = Scores(
        release_sha256="r",
        manifest_sha256="m",
        exact_match=interval,
        blind_exact_match=interval,
        exact_match_by_bucket={},
        num_questions=2,
        num_images=2,
        generate_s=1.0,
    )
    found.parity.write_text(parity.model_dump_json())
    found.scores.write_text(scores.model_dump_json())
    row = dict.fromkeys(PREDICTIONS.names, "x") | {"turn": 1, "bucket": 0, "blind_correct": False}
    rows = [row | {"key": "k1", "correct": True}, row | {"key": "k2", "correct": False}]
    pq.write_table(pa.Table.from_pylist(rows, schema=PREDICTIONS), found.predictions)
    return found


def test_answers_of_the_run_that_was_evaluated(runs, evaluation):
    desk = Desk(make_desk(runs).runs, evaluation)
    told = desk.tell(ask("aaaa", tab="answers"))
    assert [answer.correct for answer in told.answers] == [False, True]
    assert desk.tell(ask("bbbbb", tab="answers")).answers == ()
    assert "No evaluation of run bbbbb" in desk.tell(ask("bbbbb", tab="answers")).note


def test_images_come_from_the_report_s_examples(runs, evaluation):
    table = pq.read_table(evaluation.predictions)
    images = pa.array([[b"png"], [b"<svg onload=x>"]], pa.list_(pa.binary()))
    types = pa.array([["image/png"], ["image/svg+xml"]])
    examples = table.append_column("images", images).append_column("image_types", types)
    pq.write_table(examples, evaluation.examples)
    desk = Desk(make_desk(runs).runs, evaluation)
    first, second = desk.tell(ask("aaaa", tab="answers")).answers
    assert first.images == (f"data:image/png;base64,{base64.b64encode(b'png').decode()}",)
    assert second.images == ()


def test_charts_have_names_of_their_own():
    names = [chart.name for chart in CHARTS]
    assert len(names) == len(set(names))
