"""One truth: stages, pipelines, parameter files, recipes, catalog and README say the same."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from kedro.config import OmegaConfigLoader
from kedro.framework.startup import bootstrap_project

from diptych.cli import stages_text
from diptych.parameters import check
from diptych.pipeline_registry import own_pipelines
from diptych.settings import CONFIG_LOADER_ARGS

ROOT = Path(__file__).parent.parent
CONF = ROOT / "conf"
RECIPES = sorted(
    path.name for path in CONF.iterdir() if path.is_dir() and path.name not in ("base", "local")
)


@pytest.fixture(scope="module")
def stages() -> dict:
    return yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]


def test_dvc_yaml_is_what_the_pipelines_say():
    bootstrap_project(ROOT)
    assert (ROOT / "dvc.yaml").read_text() == stages_text(ROOT), "run `kedro dvc-sync`"


def test_stages_pipelines_and_parameter_files_have_the_same_names(stages: dict):
    names = list(own_pipelines())
    assert list(stages) == names
    files = {path.stem.removeprefix("parameters_") for path in CONF.glob("base/parameters_*.yml")}
    assert files == set(names)
    for name in names:
        text = (CONF / "base" / f"parameters_{name}.yml").read_text()
        assert list(yaml.safe_load(text)) == [name]


def test_the_readme_has_the_pipelines_in_a_table():
    text = (ROOT / "README.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \|", text, flags=re.MULTILINE)
    names = list(own_pipelines())
    assert [row for row in rows if row in names] == names


def test_a_training_parameter_reruns_train_and_what_follows_only(stages: dict):
    """What DVC would rerun after a change of train.optimizer, by the stages' deps and outs."""

    def reads(stage: dict, name: str) -> bool:
        keys = [key for group in stage.get("params", []) for keys in group.values() for key in keys]
        return any(name == key or name.startswith(f"{key}.") for key in keys)

    changed: set[str] = set()
    rerun = []
    for name, stage in stages.items():
        if reads(stage, "train.optimizer.lr") or changed & set(stage["deps"]):
            rerun.append(name)
            changed |= {next(iter(out)) if isinstance(out, dict) else out for out in stage["outs"]}
    assert rerun == ["train", "export", "evaluate", "report"]


def test_stages_follow_from_each_other_and_from_what_is_in_git(stages: dict):
    made: set[str] = set()
    for name, stage in stages.items():
        for dep in stage["deps"]:
            assert dep in made or (ROOT / dep).exists(), f"{name} reads {dep}, nobody makes it"
            assert dep in made or not dep.startswith("data/"), f"{name} reads {dep} of git"
        made |= {next(iter(out)) if isinstance(out, dict) else out for out in stage["outs"]}
    # Checkpoints must survive a stage that failed: DVC empties outputs before it runs a stage.
    assert not any("runs" in out for out in made)


def test_stages_read_parameters_that_are_in_the_files(stages: dict):
    for stage in stages.values():
        for group in stage.get("params", []):
            for file, keys in group.items():
                values = yaml.safe_load((ROOT / file).read_text())
                for key in keys:
                    found = values
                    for part in key.split("."):
                        assert part in found, f"{file} has no {key}"
                        found = found[part]


def test_parameter_files_have_no_references():
    """`dvc exp run -S` would write their values in place of them, for good."""
    for path in CONF.rglob("parameters*.yml"):
        assert "${" not in path.read_text(), path


@pytest.mark.parametrize("recipe", ["base", *RECIPES])
def test_every_recipe_holds_right_parameters_that_differ_from_the_base(recipe: str):
    def load(env: str) -> dict:
        return OmegaConfigLoader(conf_source=str(CONF), env=env, **CONFIG_LOADER_ARGS)["parameters"]

    check(load(recipe), runtime={})
    assert recipe == "base" or load(recipe) != load("base")


def test_folders_and_catalog_name_the_same_places():
    folders = yaml.safe_load((CONF / "base" / "parameters.yml").read_text())["folders"]
    catalog = yaml.safe_load((CONF / "base" / "catalog.yml").read_text())
    runs, stages = folders.pop("runs"), folders.pop("stages")
    assert {name: catalog[name]["filepath"] for name in folders} == folders
    assert runs == f"{Path(catalog['run']['filepath']).parent}/runs"
    of_stages = {name: each for name, each in catalog.items() if name.startswith("stages.")}
    for name, each in of_stages.items():
        made = Path(each["filepath"])
        assert made.parent.as_posix() == f"{stages}/{{stage}}"
        assert made.stem == name.rpartition(".")[2]


def test_git_keeps_no_data_but_metrics():
    lines = (ROOT / ".gitignore").read_text().splitlines()
    kept = {line for line in lines if line.startswith("!data/")}
    assert kept == {
        "!data/*/",
        "!data/*/.gitkeep",
        "!data/*/*.dvc",
        "!data/08_reporting/summary.json",
    }
    assert ".telemetry" not in lines
