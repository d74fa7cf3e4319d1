"""Logs that grow, are cut, are replaced, are long: what is known of them at every look."""

from __future__ import annotations

import os
import time

import pytest

from diptych.dashboard import logs as module
from diptych.dashboard.cache import Cache, Position, guard
from diptych.dashboard.columns import parse_steps
from diptych.dashboard.logs import Logs
from tests.dashboard.folders import lines, observed


@pytest.fixture
def path(tmp_path):
    return tmp_path / "steps.jsonl"


@pytest.fixture
def kept(tmp_path):
    return Cache(tmp_path / "cache")


def _steps(begin, end):
    return lines([observed(step) for step in range(begin, end)])


def _look_until_whole(logs, path):
    until = time.monotonic() + 60
    while time.monotonic() < until:
        table, word = logs.look(path, parse=parse_steps)
        if not word.startswith("preview"):
            return table
        time.sleep(0.01)
    raise AssertionError("it was not read")


def test_a_log_grows(path):
    logs = Logs(cache=Cache(None))
    assert logs.look(path, parse=parse_steps)[1] == "none"
    path.write_bytes(_steps(1, 4) + b'{"step": 4, "lo')
    table, word = logs.look(path, parse=parse_steps)
    assert table.column("step").tolist() == [1, 2, 3]
    assert logs.look(path, parse=parse_steps)[1] == word
    path.write_bytes(_steps(1, 6))
    table, later = logs.look(path, parse=parse_steps)
    assert table.column("step").tolist() == [1, 2, 3, 4, 5]
    assert later != word


def test_many_looks_are_many_chunks(path):
    logs = Logs(cache=Cache(None))
    for step in range(1, 100):
        with path.open("ab") as file:
            file.write(_steps(step, step + 1))
        table, _ = logs.look(path, parse=parse_steps)
    assert table.column("step").tolist() == list(range(1, 100))
    assert len(table.column("loss")) == 99


@pytest.mark.parametrize("how", ["replaced", "cut"])
def test_a_log_that_was_cut_is_read_anew(path, how):
    logs = Logs(cache=Cache(None))
    path.write_bytes(_steps(1, 9))
    logs.look(path, parse=parse_steps)
    if how == "replaced":
        other = path.with_name("other")
        other.write_bytes(_steps(1, 5))
        os.replace(other, path)
    else:
        path.write_bytes(_steps(1, 5))
    table, _ = logs.look(path, parse=parse_steps)
    assert table.column("step").tolist() == [1, 2, 3, 4]


@pytest.fixture
def long(path, monkeypatch):
    monkeypatch.setattr(module, "AT_ONCE_BYTES", 4000)
    monkeypatch.setattr(module, "_CHUNK_BYTES", 9000)
    monkeypatch.setattr(module, "_KEPT_BYTES", 1)
    monkeypatch.setattr(module, "_WAIT_S", 0.0)
    path.write_bytes(_steps(1, 301))
    return path


def test_of_a_long_log_some_lines_are_shown_until_all_are_read(long, monkeypatch):
    monkeypatch.setattr(module, "_PREVIEW_LINES", 20)
    logs = Logs(cache=Cache(None))
    table, word = logs.look(long, parse=parse_steps)
    steps = table.column("step").tolist()
    assert word.startswith("preview")
    assert (steps[0], steps[-1]) == (1, 300)
    assert 10 < len(steps) < 30
    assert steps == sorted(set(steps))
    whole = _look_until_whole(logs, long)
    assert whole.column("step").tolist() == list(range(1, 301))
    logs.close()


def test_what_was_read_is_kept(long, kept):
    logs = Logs(cache=kept)
    _look_until_whole(logs, long)
    logs._pool.shutdown(wait=True)
    with long.open("ab") as file:
        file.write(_steps(301, 303))
    table, word = Logs(cache=kept).look(long, parse=lambda data: {**parse_steps(data)})
    assert not word.startswith("preview")
    assert table.column("step").tolist() == list(range(1, 303))
    assert table.column("heldout_loss")[[9, 19]].tolist() == [2.5, 2.5]


def _position(path):
    stat = path.stat()
    return Position(stat.st_ino, stat.st_size, guard(path, offset=stat.st_size))


def test_what_is_kept_of_another_log_is_not_used(path, kept, tmp_path):
    path.write_bytes(_steps(1, 5))
    kept.save(path, position=_position(path), columns=parse_steps(_steps(1, 5)))
    position, columns = kept.load(path)
    assert position.offset == path.stat().st_size
    assert columns["step"].tolist() == [1, 2, 3, 4]
    before = path.read_bytes()
    path.write_bytes(before.replace(b'"step":2', b'"step":7'))
    assert kept.load(path) is None
    path.write_bytes(before[:-10])
    assert kept.load(path) is None
    path.write_bytes(before)
    assert kept.load(path) is not None
    (found,) = (tmp_path / "cache").glob("*.arrow")
    found.write_bytes(b"ARROW1 is damaged")
    assert kept.load(path) is None


def test_the_cache_has_a_size(tmp_path):
    kept = Cache(tmp_path / "cache", most_bytes=10)
    for name in ("one", "two"):
        path = tmp_path / name
        path.write_bytes(_steps(1, 3))
        kept.save(path, position=_position(path), columns=parse_steps(_steps(1, 3)))
    assert kept.load(tmp_path / "one") is None
    assert kept.load(tmp_path / "two") is not None


def test_a_folder_that_cannot_be_written_keeps_nothing(path, tmp_path):
    (tmp_path / "file").write_text("")
    kept = Cache(tmp_path / "file" / "cache")
    path.write_bytes(_steps(1, 3))
    kept.save(path, position=_position(path), columns=parse_steps(_steps(1, 3)))
    assert kept.load(path) is None
