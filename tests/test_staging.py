"""Stages in the parameters: what they take over, and what they are refused for."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from kedro.config import OmegaConfigLoader

from diptych.core.errors import ConfigError
from diptych.parameters import check
from diptych.pipeline_registry import own_pipelines
from diptych.session import read_stages
from diptych.settings import CONFIG_LOADER_ARGS

CONF = Path(__file__).parent.parent / "conf"


@pytest.fixture
def raw() -> dict[str, Any]:
    return {
        key: value
        for path in (CONF / "base").glob("parameters*.yml")
        for key, value in yaml.safe_load(path.read_text()).items()
    }


def refusal(raw: dict[str, Any], given: Any, **options: Any) -> str:
    raw["stages"] = given
    with pytest.raises(ConfigError) as error:
        check(raw, runtime={}, **options)
    return str(error.value)


def test_a_stage_is_the_main_sections_with_what_differs(raw: dict[str, Any]):
    raw["train"]["optimizer"]["betas"] = [0.8, 0.9]
    raw["export"]["dtype"] = "bf16"
    raw["stages"] = {
        "align": {
            "plan": {"model": {"freeze": ["vision", "language"]}, "layout": {"micro_batch": 4}},
            "train": {"num_steps": 200, "optimizer": {"lr": 0.01}},
        },
        "left_out": None,
    }
    checked = check(raw, runtime={})
    assert list(checked.stages) == ["align"]
    stage = checked.stages["align"]
    assert stage.train.num_steps == 200
    assert stage.train.optimizer.lr == 0.01
    assert stage.train.optimizer.betas == (0.8, 0.9)
    assert stage.train.schedule == checked.train.schedule
    assert stage.plan.layout.micro_batch == 4
    assert stage.plan.model == checked.plan.model.model_copy(
        update={"freeze": ("vision", "language")}
    )
    assert stage.folders.runs == "data/06_models/stages/align/runs"
    assert stage.folders.release == "data/06_models/stages/align/release"
    # Nothing is rounded between stages unless a stage says so itself.
    assert (checked.export.dtype, stage.export.dtype) == ("bf16", "fp32")
    assert checked.train.num_steps == 1200
    assert checked.plan.model.freeze == ()
    raw["stages"]["align"]["export"] = {"dtype": "bf16"}
    assert check(raw, runtime={}).stages["align"].export.dtype == "bf16"


STEPS = {"train": {"num_steps": 100}}


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ({"align": {}}, "'stages.align' has no steps. Set stages.align.train.num_steps."),
        ({"align": {"train": {"seed": 1}}}, "'stages.align' has no steps."),
        ({"align": {"train": {"num_steps": 0}}}, "'stages.align.train.num_steps' is 0: Input"),
        (
            {"align": {"train": {"num_step": 9, "num_steps": 100}}},
            "'stages.align.train.num_step' is unknown. "
            "Did you mean 'stages.align.train.num_steps'?",
        ),
        (
            {"align": {**STEPS, "plan": {"model": {"freez": ["vision"]}}}},
            "'stages.align.plan.model.freez' is unknown. "
            "Did you mean 'stages.align.plan.model.freeze'?",
        ),
        (
            {"align": {**STEPS, "plan": {"layuot": {}}}},
            "'stages.align.plan.layuot' is unknown. Did you mean 'stages.align.plan.layout'?",
        ),
        ({"align": {**STEPS, "trian": {}}}, "'stages.align.trian' is not a stage's own (a stage"),
        ({"align": {**STEPS, "trian": {}}}, "Did you mean 'train'?"),
        ({"align": {**STEPS, "prepare": {}}}, "(a stage sets plan, train, export). Allowed:"),
        ({"align": {**STEPS, "folders": {}}}, "'stages.align.folders' is not a stage's own"),
        ({"align": {**STEPS, "plan": {"cluster": {}}}}, "all stages run on one machine"),
        *[
            (
                {"one": STEPS, "two": {**STEPS, "plan": {"model": {field: value}}}},
                f"'stages.two.plan.model.{field}': a stage trains the model that plan.model says",
            )
            for field, value in [
                ("family", "llava"),
                ("sizes", {"text": {"hidden_size": 64}}),
                ("weights", "elsewhere"),
                ("tie_word_embeddings", False),
            ]
        ],
        ({"train": STEPS}, "'stages.train': a stage has a name of its own in lower case"),
        ({"Two words": STEPS}, "'stages.Two words': a stage has a name of its own"),
        ({"align": 5}, "'stages.align' is 5. A stage sets plan, train, export."),
        ({"align": {"train": {"num_steps": 10}}}, "the warm-up cannot be longer than the run"),
        ({"align": {"train": 7}}, "'stages.align.train' is 7: Input should be"),
        ([STEPS], "Name each stage"),
    ],
)
def test_what_a_stage_cannot_have(raw: dict[str, Any], stages: Any, message: str):
    assert message in refusal(raw, stages)


def test_what_a_later_training_is_refused_for_is_said_before_the_first(raw: dict[str, Any]):
    frozen = {"plan": {"model": {"freeze": ["vision", "connector", "language"]}}}
    told = refusal(raw, {"one": STEPS, "two": {**STEPS, **frozen}})
    assert told.startswith("In the stage 'two': plan.model.freeze names vision, connector, lang")
    # Nobody is refused for a main training that may stand alone until it is composed.
    raw["train"]["vision_features"] = "data/05_model_input/features"
    assert check({**raw, "stages": {}}, runtime={}).train.vision_features
    stage = {**STEPS, "plan": {"model": {"freeze": ["vision"]}}}
    assert refusal(raw, {"one": stage}).startswith("train.vision_features keeps what the vision")


def test_a_wrong_main_parameter_is_told_of_once_and_not_for_every_stage(raw: dict[str, Any]):
    raw["train"]["num_step"] = 5
    raw["export"]["num_samples"] = 0
    told = refusal(raw, {"align": {"train": {"num_steps": 100, "optimizer": {"lr": -1}}}})
    problems = [line.split("'")[1] for line in told.splitlines() if line.startswith("  - ")]
    assert problems == [
        "export.num_samples",
        "stages.align.train.optimizer.lr",
        "train.num_step",
    ]


def test_params_change_a_stage_but_add_none(raw: dict[str, Any]):
    told = refusal(raw, {"align": STEPS, "algin": {"train": {"num_steps": 3}}}, stages=("align",))
    assert "'stages.algin' is unknown: --params cannot add a stage. Did you mean 'align'?" in told


def test_no_stage_is_called_as_a_pipeline(raw: dict[str, Any]):
    for name in [*own_pipelines(), "stages", "always"]:
        assert f"'stages.{name}': a stage has a name of its own" in refusal(raw, {name: STEPS})


def loader(folder: Path, text: str, **options: Any) -> OmegaConfigLoader:
    shutil.copytree(CONF / "base", folder / "base")
    (folder / "mine").mkdir()
    (folder / "mine" / "parameters.yml").write_text(text)
    return OmegaConfigLoader(conf_source=str(folder), env="mine", **CONFIG_LOADER_ARGS, **options)


def test_the_order_is_that_of_the_files_whatever_params_name_first(tmp_path: Path):
    text = "stages:\n  one: {train: {num_steps: 9}}\n  two: {train: {num_steps: 9}}\n"
    given = {"stages": {"two": {"train": {"num_steps": 3}}}}
    found = loader(tmp_path, text, runtime_params=given)
    assert list(found["parameters"]["stages"]) == ["two", "one"]
    assert read_stages(found) == ("one", "two")
    assert found["parameters"]["stages"]["two"]["train"]["num_steps"] == 3


def test_two_stages_of_one_name_are_refused(tmp_path: Path):
    text = "stages:\n  one: {train: {num_steps: 9}}\n  one: {train: {num_steps: 9}}\n"
    with pytest.raises(
        ConfigError, match=r"found duplicate key one.* two stages cannot have one name"
    ):
        read_stages(loader(tmp_path, text))


def test_a_stage_does_not_fork_from_the_main_training_s_runs(raw: dict[str, Any]):
    raw["train"]["fork_from"] = "0123456789ab@7"
    raw["stages"] = {
        "align": {"train": {"num_steps": 200}},
        "tune": {"train": {"num_steps": 200, "fork_from": "fedcba987654@newest"}},
    }
    checked = check(raw, runtime={})
    assert checked.train.fork_from == "0123456789ab@7"
    assert checked.stages["align"].train.fork_from is None
    assert checked.stages["tune"].train.fork_from == "fedcba987654@newest"
