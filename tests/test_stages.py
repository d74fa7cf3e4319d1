"""DVC's stages of a project whose raw data are a person's own."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from kedro.framework.startup import bootstrap_project
from kedro.io import DataCatalog

from diptych.cli import stages_text
from diptych.data.sources import SourceParams
from diptych.parameters import Parameters, check
from diptych.pipeline_registry import own_pipelines, use_stages
from diptych.stages import write_stages

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def parameters() -> Parameters:
    texts = [path.read_text() for path in (ROOT / "conf" / "base").glob("parameters*.yml")]
    return check({k: v for text in texts for k, v in yaml.safe_load(text).items()}, runtime={})


def prepare_stage(parameters: Parameters, **sources: SourceParams) -> dict:
    catalog = yaml.safe_load((ROOT / "conf" / "base" / "catalog.yml").read_text())
    for config in catalog.values():
        config["filepath"] = str(ROOT / config["filepath"])
    section = parameters.prepare.model_copy(update={"sources": sources})
    text = write_stages(
        own_pipelines(),
        catalog=DataCatalog.from_config(catalog),
        parameters=parameters.model_copy(update={"prepare": section}),
        root=ROOT,
    )
    return yaml.safe_load(text)["stages"]["prepare"]


def raw_deps(stage: dict) -> list[str]:
    return [dep for dep in stage["deps"] if not dep.startswith("src/")]


def test_starter_data_are_made_by_the_stage_and_kept(parameters: Parameters):
    stage = prepare_stage(parameters, digits=SourceParams(path="data/01_raw/digits"))
    assert raw_deps(stage) == []
    assert stage["outs"][0] == {"data/01_raw/digits": {"persist": True}}


@pytest.mark.parametrize(
    ("path", "images", "deps"),
    [
        ("data/01_raw/mine/samples.json", None, ["data/01_raw/mine"]),
        ("data/01_raw/mine/samples.json", "data/01_raw/mine", ["data/01_raw/mine"]),
        (
            "data/01_raw/mine.json",
            "data/01_raw/photos",
            ["data/01_raw/mine.json", "data/01_raw/photos"],
        ),
    ],
)
def test_data_that_a_person_brought_are_read_by_the_stage(
    parameters: Parameters, path: str, images: str | None, deps: list[str]
):
    mine = SourceParams(kind="llava", path=path, images=images)
    stage = prepare_stage(parameters, mine=mine)
    assert raw_deps(stage) == deps
    assert stage["outs"][0] == "data/01_raw/raw_samples.json"


@pytest.mark.parametrize(
    ("source", "deps"),
    [
        ({"kind": "parquet", "path": "data/01_raw/pages/*.parquet"}, ["data/01_raw/pages"]),
        ({"kind": "webdataset", "path": "data/01_raw/tars/{000..003}.tar"}, ["data/01_raw/tars"]),
        ({"kind": "parquet", "path": "data/01_raw/pages.parquet"}, ["data/01_raw/pages.parquet"]),
        (
            {"kind": "csv", "path": ["data/01_raw/a.csv", "data/02/b.csv"]},
            ["data/01_raw", "data/02"],
        ),
        ({"kind": "webdataset", "path": "s3://bucket/tars"}, []),
    ],
)
def test_patterns_and_urls(parameters: Parameters, source: dict, deps: list[str]):
    stage = prepare_stage(parameters, mine=SourceParams(**source))
    assert raw_deps(stage) == deps


def test_a_stage_of_training_is_a_stage_of_dvc():
    bootstrap_project(ROOT)
    text = stages_text(ROOT, env="starter_cpu_stages")
    use_stages(())
    stages = yaml.safe_load(text)["stages"]
    order = ["prepare", "plan", "align", "train", "export", "evaluate", "report"]
    assert list(stages) == order
    assert all(stage["cmd"].endswith(" --env=starter_cpu_stages") for stage in stages.values())
    align, train = stages["align"], stages["train"]
    made = {f"data/06_models/stages/align/{name}" for name in ("release", "parity.json")}
    assert made <= set(align["outs"])
    assert made <= set(train["deps"])
    assert not any("stages/align" in dep for dep in stages["plan"]["deps"])
    # Its settings are in two places: the main sections and what it says itself.
    assert {file: keys for group in align["params"] for file, keys in group.items()} == {
        "conf/base/parameters_export.yml": ["export"],
        "conf/base/parameters_plan.yml": ["plan.layout", "plan.model"],
        "conf/base/parameters_train.yml": ["train"],
        "conf/starter_cpu_stages/parameters_stages.yml": ["stages.align"],
        "conf/starter_cpu_stages/parameters_train.yml": ["train"],
    }
    assert "conf/starter_cpu_stages/parameters_stages.yml" not in str(train["params"])
