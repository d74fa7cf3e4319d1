from __future__ import annotations

import itertools

import pytest

from diptych.monitor.run_folder import StepTail
from diptych.monitor.tails import (
    last_line_begin,
    last_lines,
    parse_objects,
    sample_lines,
    tail,
)
from tests.launch.test_progress import record


def _write(path, text):
    path.write_bytes(text)
    return path


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (b"", []),
        (b"a\nb\nc\n", [b"b", b"c"]),
        (b"a\nb\nc", [b"b", b"c"]),
        (b"\n\n\n", [b"", b""]),
        (b"only", [b"only"]),
    ],
)
def test_the_last_lines_of_a_file(tmp_path, text, lines):
    assert tail(_write(tmp_path / "log", text), num_lines=2) == lines


def test_long_lines_are_found_whole(tmp_path):
    lines = [bytes([97 + number % 26]) * 50_000 for number in range(20)]
    path = _write(tmp_path / "log", b"\n".join(lines) + b"\n")
    assert tail(path, num_lines=5) == lines[-5:]
    assert tail(path, num_lines=100) == lines
    assert tail(path, num_lines=0) == []
    assert tail(path, num_lines=1, end=2 * 50_001) == [lines[1]]


def test_a_line_that_is_being_written_is_left_out(tmp_path):
    path = _write(tmp_path / "steps", b'{"a": 1}\n{"a": 2}\n{"a"')
    assert last_lines(path, most_bytes=100) == [b'{"a": 1}', b'{"a": 2}']
    assert last_lines(path, most_bytes=14) == [b'{"a": 2}']
    assert last_lines(tmp_path / "absent", most_bytes=10) == []
    assert last_line_begin(path) == 9


def test_damaged_lines_are_passed_over():
    assert list(parse_objects([b'{"a": 1}', b"\xff{", b"[3]", b'{"a": 2}'])) == [{"a": 2}, {"a": 1}]


def test_a_sample_spans_the_whole_file_and_keeps_its_order(tmp_path):
    numbers = [b"%06d" % number + b"x" * 5000 for number in range(1000)]
    path = _write(tmp_path / "steps", b"\n".join(numbers) + b"\n")
    found = [int(line[:6]) for line in sample_lines(path, num_lines=50)]
    assert found == sorted(set(found))
    assert found[0] == 0
    assert 40 <= len(found) <= 52
    gaps = [after - before for before, after in itertools.pairwise(found)]
    assert max(gaps) <= 21
    short = _write(tmp_path / "short", b"1\n2\n3")
    assert sample_lines(short, num_lines=50) == [b"1", b"2"]


def test_a_tail_can_begin_with_the_last_record(tmp_path):
    path = tmp_path / "steps.jsonl"
    lines = [record(step).model_dump_json() + "\n" for step in range(1, 1000)]
    path.write_text("".join(lines) + '{"step": 10')
    steps = StepTail(path, begin="end")
    assert [each.step for each in steps.read()] == [999]
    with path.open("a") as file:
        file.write(record(1000).model_dump_json().removeprefix('{"step":10') + "\n")
    assert steps.read()[0].step == 1000
