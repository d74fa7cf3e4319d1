"""The console's last words: what a run came to, from the numbers that were measured."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil
import pytest
from kedro.io import DataCatalog
from kedro.pipeline import Node, Pipeline

from diptych.core.records import Summary
from diptych.datasets import PageDataset, RecordDataset
from diptych.hooks import STARTED, ProjectHooks

SUMMARY = Summary(
    exact_match=0.8,
    exact_match_low=0.77,
    exact_match_high=0.83,
    blind_exact_match=0.2,
    read_exact_match=0.9625,
    read_exact_match_low=0.94,
    read_exact_match_high=0.98,
    blind_read_exact_match=0.05,
    parity_max_abs=2.5e-6,
    num_steps=800,
    final_loss=0.125,
    run_s=312.0,
    release="data/06_models/release",
    manifest_sha256="a" * 64,
    run_id="abc",
)
REPORT = Pipeline([Node(lambda run: run, inputs="run", outputs="summary", name="summarise")])


@pytest.fixture
def catalog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DataCatalog:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(STARTED, str(time.time() - 65))
    return DataCatalog(
        {
            "summary": RecordDataset(filepath=str(tmp_path / "summary.json"), record="Summary"),
            "data_page": PageDataset(filepath=str(tmp_path / "data.html")),
            "report": PageDataset(filepath=str(tmp_path / "deep" / "report.html")),
        }
    )


def test_the_result_is_told_in_whole_lines(
    catalog: DataCatalog, capsys: pytest.CaptureFixture[str]
):
    catalog.save("summary", SUMMARY)
    ProjectHooks().after_pipeline_run(pipeline=REPORT, catalog=catalog)
    told = capsys.readouterr().out
    for value in (
        "0.963 (0.940 to 0.980)",
        "0.050",
        "2.5e-06",
        "0.1250 (800 steps)",
        "1 min 05 s (of the run that made it: 5 min 12 s)",
        "deep/report.html",
    ):
        assert value in told


def test_what_was_not_measured_is_said_to_be_so(
    catalog: DataCatalog, capsys: pytest.CaptureFixture[str]
):
    catalog.save("summary", Summary(**dict.fromkeys(Summary.model_fields)))
    ProjectHooks().after_pipeline_run(pipeline=REPORT, catalog=catalog)
    told = capsys.readouterr().out
    assert told.count("not measured") == 6
    assert "0.0" not in told


def test_a_run_without_report_tells_nothing(
    catalog: DataCatalog, capsys: pytest.CaptureFixture[str]
):
    ProjectHooks().after_pipeline_run(pipeline=Pipeline([]), catalog=catalog)
    assert capsys.readouterr().out == ""


def test_a_run_that_ends_before_training_says_where_the_data_are_shown(
    catalog: DataCatalog, capsys: pytest.CaptureFixture[str]
):
    plan = Pipeline([Node(lambda: "", inputs=None, outputs="data_page", name="show")])
    ProjectHooks().after_pipeline_run(pipeline=plan, catalog=catalog)
    assert capsys.readouterr().out == "Look at the data: data.html\n"


def test_the_start_is_that_of_the_process(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(STARTED, raising=False)
    ProjectHooks().after_context_created()
    assert float(os.environ[STARTED]) == psutil.Process().create_time()


def test_a_dvc_stage_is_not_a_whole_run(
    catalog: DataCatalog, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("DVC_STAGE", "report")
    ProjectHooks().after_context_created()
    assert STARTED not in os.environ
    catalog.save("summary", SUMMARY)
    ProjectHooks().after_pipeline_run(pipeline=REPORT, catalog=catalog)
    assert "time                                  │ 5 min 12 s" in capsys.readouterr().out
