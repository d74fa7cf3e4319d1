"""`kedro import-deepspeed`: files in, tables and files of conf/ out."""

from __future__ import annotations

import json

import pytest
import yaml

from diptych.core.errors import ConfigError
from diptych.imports import read_config, show_import, write_import

CONFIG = {"gradient_clipping": 0.5, "zero_optimization": {"stage": 1}, "scheduler": {}}


@pytest.fixture
def found(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(CONFIG))
    return read_config(path)


def test_it_is_written_as_overrides(found, tmp_path):
    paths = write_import(found, folder=tmp_path / "conf" / "mine")
    assert [path.name for path in paths] == ["parameters_plan.yml", "parameters_train.yml"]
    plan, train = (yaml.safe_load(path.read_text()) for path in paths)
    assert plan == {"plan": {"layout": {"engine": "zero", "zero": {"stage": 1}}}}
    assert train == {"train": {"optimizer": {"max_grad_norm": 0.5}}}


def test_a_file_that_is_there_is_not_overwritten(found, tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "parameters_train.yml").write_text("train: {}")
    with pytest.raises(ConfigError, match="is there already"):
        write_import(found, folder=folder)
    assert [path.name for path in folder.iterdir()] == ["parameters_train.yml"]


def test_it_says_what_changes_and_what_is_left_out(found, capsys):
    show_import(found, present={"train": {"optimizer": {"max_grad_norm": 1.0}}})
    shown = capsys.readouterr().out
    assert "0.5" in shown
    assert "1.0" in shown
    assert "warmup_steps" in shown


@pytest.mark.parametrize(("text", "words"), [("{", "is no JSON"), (None, "cannot be read")])
def test_a_file_that_cannot_be_read(text, words, tmp_path):
    path = tmp_path / "ds.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_config(path)
