"""Parameters are checked before anything runs; every error names the nearest right name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from diptych.core.errors import ConfigError
from diptych.parameters import Parameters, check

BASE = Path(__file__).parent.parent / "conf" / "base"


@pytest.fixture
def raw() -> dict[str, Any]:
    return {
        key: value
        for path in BASE.glob("parameters*.yml")
        for key, value in yaml.safe_load(path.read_text()).items()
    }


def set_at(raw: dict[str, Any], name: str, value: Any) -> None:
    *sections, field = name.split(".")
    for section in sections:
        raw = raw[section]
    raw[field] = value


def test_the_base_files_are_right_and_complete(raw: dict[str, Any]):
    checked = check(raw, runtime={})
    assert checked.train.optimizer.lr == 1.5e-3
    assert checked.prepare.sources["digits"].kind == "starter"

    def missing(section: Any, given: Any, prefix: str) -> list[str]:
        names = [f"{prefix}{name}" for name in section.model_fields_set ^ set(given)]
        for name in type(section).model_fields:
            inner = getattr(section, name)
            if hasattr(inner, "model_fields_set") and name in given:
                names += missing(inner, given[name], f"{prefix}{name}.")
        return names

    assert missing(checked, raw, "") == []
    # What a person may set is all there, so that a file shows every choice.
    unset = [
        f"{top}.{name}"
        for top in ("train", "export", "evaluate")
        for name in type(getattr(checked, top)).model_fields
        if name not in raw[top]
    ]
    assert unset == []


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("train.num_step", 5, "'train.num_step' is unknown. Did you mean 'train.num_steps'?"),
        (
            "train.optimizer.learning_rate",
            1,
            "'train.optimizer.learning_rate' is unknown.",
        ),
        (
            "plan.layout.global_batch",
            1,
            "is unknown. Did you mean 'train.schedule.global_batch'?",
        ),
        (
            "prepare.sources.digits.pth",
            "x",
            "'prepare.sources.digits.pth' is unknown. Did you mean 'prepare.sources.digits.path'?",
        ),
        ("evaluation", {}, "'evaluation' is unknown. Did you mean 'evaluate'?"),
        ("train.num_steps", "many", "'train.num_steps' is 'many': Input should be a valid integer"),
        ("train.num_steps", 0, "'train.num_steps' is 0: Input should be greater than or equal to"),
        ("train.optimizer.lr", None, "'train.optimizer.lr' is None: Input should be a valid num"),
        ("train.optimizer.towers", {"visoin": {}}, "no tower 'visoin'. Did you mean 'vision'?"),
        (
            "train.optimizer.towers",
            {"vision": {"lr": -1}},
            "'train.optimizer.towers.vision.lr' is -1",
        ),
        (
            "train.optimizer.towers",
            {"vision": {"layer_deacy": 0.9}},
            "Did you mean 'train.optimizer.towers.vision.layer_decay'?",
        ),
        ("export.weights", "ema", "'export': weights is ema, and train.ema_decay is null"),
        ("train.contrast", {}, "'train': contrast is set and schedule.mode is bucket"),
        ("train.contrast", {"weight": 0}, "'train.contrast.weight' is 0"),
        ("plan.layout.engine", "fsdp", "Input should be 'auto', 'ddp', 'fsdp2' or 'zero'"),
        ("train.checkpoint_saving", "assync", "'sync'. Did you mean 'async'?"),
        ("export.checkpoint", "foo", "'export.checkpoint': it is 'foo'; use last, best, or a step"),
        ("export.checkpoint", -1, "'export.checkpoint': it is -1; use last, best, or a step"),
        ("prepare.sources", None, "'prepare.sources' is None"),
        ("train", [1], r"'train' is [1]: Input should be a valid dictionary"),
    ],
)
def test_a_wrong_parameter_is_named_with_what_is_right(
    raw: dict[str, Any], name: str, value: Any, message: str
):
    set_at(raw, name, value)
    with pytest.raises(ConfigError) as error:
        check(raw, runtime={})
    assert message in str(error.value)
    assert "conf/base/parameters*.yml" in str(error.value)


def test_all_problems_are_told_at_once(raw: dict[str, Any]):
    set_at(raw, "train.num_step", 5)
    set_at(raw, "export.dtype", "int4")
    del raw["folders"]["runs"]
    with pytest.raises(ConfigError) as error:
        check(raw, runtime={})
    problems = [line for line in str(error.value).splitlines() if line.startswith("  - ")]
    assert [problem.split("'")[1] for problem in problems] == [
        "export.dtype",
        "folders.runs",
        "train.num_step",
    ]


def test_a_top_level_key_that_kedro_would_drop_is_refused(raw: dict[str, Any]):
    runtime = {"trian": {"num_steps": 5}}
    with pytest.raises(ConfigError, match=r"'trian' is unknown. Did you mean 'train'\?"):
        check(raw, runtime=runtime)


def test_a_source_set_to_null_is_left_out(raw: dict[str, Any]):
    mine = {"kind": "llava", "path": "data/01_raw/mine/samples.json"}
    raw["prepare"]["sources"] = {"digits": None, "mine": mine}
    assert list(check(raw, runtime={}).prepare.sources) == ["mine"]


def test_sections_are_frozen(raw: dict[str, Any]):
    checked = check(raw, runtime={})
    assert isinstance(checked, Parameters)
    with pytest.raises(ValueError, match="frozen"):
        checked.train.seed = 1  # type: ignore[misc]
