"""`kedro families`: the families that are built, as a table."""

from __future__ import annotations

import pytest

from diptych.core.errors import ConfigError
from diptych.data.described import processor_of
from diptych.families import show_families
from diptych.shape.families import family, names


def test_every_family_is_listed_and_found(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    show_families()
    shown = capsys.readouterr().out
    for name in names():
        assert name in shown
        assert processor_of(name) in shown
        assert family(name).name == name


def test_a_name_that_is_near_is_proposed():
    with pytest.raises(ConfigError, match="Did you mean 'llava'"):
        family("lava")
