"""`kedro diagnose` over folders as ranks leave them."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from diptych import cli as module
from diptych.core.errors import RunError
from diptych.core.records import Layout
from diptych.diagnosing import parse_steps, setting_differences
from diptych.monitor.observations import Observations, read_observations
from tests.conftest import TINY_MODEL, TINY_SCHEDULE
from tests.monitor.diagnose.records import healthy, sample, step
from tests.monitor.folders import make_run
from tests.runs import make_spec


@pytest.fixture
def kedro(tmp_path):
    def call(*arguments):
        return CliRunner().invoke(module.cli, [*arguments, "--runs", str(tmp_path)], obj=None)

    return call


def write_run(runs, name, *, data_s=0.01, num=40):
    folder = make_run(runs, name, num_records=0)
    with (folder / "steps.jsonl").open("w") as file:
        for number in range(1, num + 1):
            phases = healthy(number) | {"data": (data_s, data_s)}
            file.write(step(number, phases, time_s=1000.0 + number).model_dump_json() + "\n")
    (folder / "samples").mkdir()
    lines = [sample(1000.5 + number, cpu_fraction=0.2) for number in range(num)]
    text = "".join(each.model_dump_json() + "\n" for each in lines)
    (folder / "samples" / "n0.jsonl").write_text(text)
    return folder


def test_the_verdict_comes_first(kedro, tmp_path):
    write_run(tmp_path, "aaaa", data_s=0.5)
    done = kedro("diagnose", "aa")
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert lines[0] == "run aaaa  steps 1 to 40"
    # 0.5 of 1.49 s.
    assert lines[1] == "Ranks wait for batches, which costs 34% of the time."
    assert "train.num_workers" in done.output
    assert "not measured, and so not judged" in done.output


def test_a_healthy_run(kedro, tmp_path):
    write_run(tmp_path, "aaaa")
    assert "Healthy: nothing found in 37 steps" in kedro("diagnose", "newest").output


def test_a_line_that_is_being_written_is_left_out(kedro, tmp_path):
    folder = write_run(tmp_path, "aaaa")
    for path in (folder / "steps.jsonl", folder / "samples" / "n0.jsonl"):
        with path.open("a") as file:
            file.write('{"step": 41, "ep')
    assert "steps 1 to 40" in kedro("diagnose", "aaaa").output


def test_a_window_and_json(kedro, tmp_path):
    write_run(tmp_path, "aaaa", data_s=0.5)
    found = json.loads(kedro("diagnose", "aaaa", "--steps=11:20", "--json").output)
    assert (found["first_step"], found["last_step"]) == (11, 20)
    assert [each["bound"] for each in found["findings"]] == ["data"]


def test_a_run_against_another(kedro, tmp_path):
    write_run(tmp_path, "aaaa", data_s=0.5)
    write_run(tmp_path, "bbbb")
    shown = kedro("diagnose", "aaaa", "--against=bbbb").output
    # 1 s before and 1.49 s now.
    assert "0.671 times as fast: data -0.33" in shown
    found = json.loads(kedro("diagnose", "aaaa", "--against=bbbb", "--json").output)
    assert set(found) == {"diagnosis", "comparison"}
    assert found["comparison"]["parts"][0]["name"] == "data"


def test_a_run_without_steps_is_an_error(kedro, tmp_path):
    make_run(tmp_path, "aaaa", num_records=0)
    done = kedro("diagnose", "aaaa")
    assert done.exit_code == 1
    assert "Run aaaa has logged no step yet" in done.output


def test_a_window_without_steps_says_which_there_are(kedro, tmp_path):
    write_run(tmp_path, "aaaa")
    done = kedro("diagnose", "aaaa", "--steps=100:200")
    assert done.exit_code == 1
    assert "no step from 100 to 200. Its steps are 1 to 40" in done.output


def test_a_damaged_log_is_an_error(kedro, tmp_path):
    folder = write_run(tmp_path, "aaaa")
    (folder / "steps.jsonl").write_text("{}\n")
    done = kedro("diagnose", "aaaa")
    assert done.exit_code == 1
    assert "steps.jsonl cannot be read" in done.output


@pytest.mark.parametrize(
    ("text", "steps"),
    [(None, None), ("1:5", (1, 5)), (":5", (0, 5)), ("7:", (7, 2**62)), ("5:5", (5, 5))],
)
def test_ranges_of_steps(text, steps):
    assert parse_steps(text) == steps


@pytest.mark.parametrize("text", ["", ":", "5", "a:b", "5:1", "1:2:3", "-1:2"])
def test_what_is_no_range_is_refused(text):
    with pytest.raises(RunError, match=r"--steps is"):
        parse_steps(text)


def test_what_differs_in_the_settings_is_listed(corpus):
    def observed(**settings):
        spec = make_spec(
            corpus, layout=Layout(), model=TINY_MODEL, schedule=TINY_SCHEDULE, **settings
        )
        return Observations(run_id=spec.run_id, records=(), samples=(), spec=spec)

    lines = setting_differences(observed(num_steps=7), against=observed(num_steps=9))
    assert lines == ["num_steps: 9 -> 7"]


def test_a_stages_settings_are_named_as_the_stage_has_them(tmp_path):
    folder = write_run(tmp_path, "aaaa", data_s=0.5)
    found = read_observations(folder, stage="align").diagnose()
    named = [each.setting for each in found.findings[0].changes]
    assert named[0] == "stages.align.train.num_workers"
