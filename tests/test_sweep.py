"""What `kedro sweep` is told, and which runs it makes of that."""

from __future__ import annotations

import pytest

from diptych.core.errors import ConfigError
from diptych.sweep import combine, nested, read_assignment


@pytest.mark.parametrize(
    ("text", "path", "values"),
    [
        ("train.optimizer.lr=1e-3,3e-3", "train.optimizer.lr", [0.001, 0.003]),
        ("train.seed=0,1", "train.seed", [0, 1]),
        ("train.optimizer.kind=adamw, muon", "train.optimizer.kind", ["adamw", "muon"]),
        ("plan.model.freeze=[vision],[vision,language],[]", "plan.model.freeze", None),
        ("train.schedule.mode=pack", "train.schedule.mode", ["pack"]),
    ],
)
def test_an_assignment_is_read(text, path, values):
    values = values or [["vision"], ["vision", "language"], []]
    assert read_assignment(text) == (path, values)


@pytest.mark.parametrize("text", ["train.seed", "train.seed=", "=1,2", "train.seed=[1,2", "a={,"])
def test_what_is_no_assignment_is_refused(text):
    with pytest.raises(ConfigError, match="names no values to sweep over"):
        read_assignment(text)


def test_combinations_are_all_pairs_in_order():
    found = combine([("lr", [1, 2]), ("seed", [0, 1, 2])])
    assert [(each["lr"], each["seed"]) for each in found] == [
        (1, 0),
        (1, 1),
        (1, 2),
        (2, 0),
        (2, 1),
        (2, 2),
    ]


def test_a_setting_that_is_named_twice_is_refused():
    with pytest.raises(ConfigError, match="named twice"):
        combine([("train.seed", [0]), ("train.seed", [1])])


def test_paths_become_sections():
    values = {"train.optimizer.lr": 0.1, "train.seed": 1, "plan.model.freeze": ["vision"]}
    assert nested(values) == {
        "train": {"optimizer": {"lr": 0.1}, "seed": 1},
        "plan": {"model": {"freeze": ["vision"]}},
    }


def test_the_table_has_what_was_swept_by_its_last_word():
    from diptych.sweep import _short, _varied

    combinations = combine([("train.optimizer.lr", [1, 2]), ("train.num_steps", [5])])
    assert _varied(combinations) == ["train.optimizer.lr"]
    assert _short(["train.optimizer.lr", "train.seed"]) == ["lr", "seed"]
    assert _short(["a.path", "b.path", "c.lr"]) == ["a.path", "b.path", "lr"]
