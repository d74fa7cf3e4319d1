"""Files of samples stay small: new samples at the full rate, old ones evenly from the start."""

from __future__ import annotations

import errno
import logging
from itertools import pairwise

import pytest

from diptych.core.records import DeviceSample, NodeSample
from diptych.dashboard.cache import Cache
from diptych.dashboard.columns import parse_samples as parse_columns
from diptych.dashboard.logs import Logs
from diptych.monitor import sampler as module
from diptych.monitor.sampler import SampleLog
from diptych.monitor.samples import newest_samples, read_samples
from diptych.monitor.thin import thin

EVERY_S = 2.0
MOST, NEWEST, OLDER = 24_000, 12_000, 6_000


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(module, "_MOST_BYTES", MOST)
    monkeypatch.setattr(module, "_NEWEST_BYTES", NEWEST)
    monkeypatch.setattr(module, "_OLDER_BYTES", OLDER)


def sample(number):
    device = DeviceSample(index=0, busy_fraction=(number % 10) / 10)
    time_s = 1_000_000.0 + EVERY_S * number
    return NodeSample(time_s=time_s, node="a", attempt=0, devices=(device,))


def write(path, numbers):
    log = SampleLog(path)
    largest = 0
    for number in numbers:
        log.write(sample(number))
        largest = max(largest, path.stat().st_size)
    log.close()
    assert log.num_dropped == 0
    return largest


def numbers_of(folder):
    samples = read_samples(folder, since_s=0)
    return [round((each.time_s - 1_000_000.0) / EVERY_S) for each in samples]


@pytest.mark.parametrize("num", [2_000, 20_000])
def test_a_run_of_any_length_is_covered_from_its_start(tmp_path, num):
    path = tmp_path / "a.jsonl"
    assert write(path, range(num)) <= MOST + 200
    assert [each.name for each in tmp_path.iterdir()] == ["a.jsonl"]
    found = numbers_of(tmp_path)
    assert (found[0], found[-1]) == (0, num - 1)
    # Some 100 bytes a line: the newest 12 kB are there without a gap.
    assert found[-NEWEST // 110 :] == list(range(num - len(found[-NEWEST // 110 :]), num))
    first_gap = next(
        place for place in range(len(found) - 1, 0, -1) if found[place - 1] != found[place] - 1
    )
    old = found[:first_gap]
    assert len(old) > OLDER // 2 / 110
    gaps = [later - earlier for earlier, later in pairwise(old)]
    # As much of the first half of that time as of the second.
    middle = old[-1] / 2
    assert len(old) * 0.35 < sum(number < middle for number in old) < len(old) * 0.65
    assert max(gaps) <= 2.2 * num / len(old)


def test_every_reader_reads_across(tmp_path):
    path, logs = tmp_path / "a.jsonl", Logs(cache=Cache(None))
    write(path, range(100))
    assert len(logs.look(path, parse=parse_columns)[0].column("time_s")) == 100
    write(path, range(100, 3_000))
    times = [each.time_s for each in read_samples(tmp_path, since_s=0)]
    table, _ = logs.look(path, parse=parse_columns)
    assert table.column("time_s").tolist() == times
    logs.close()
    newest = newest_samples(tmp_path, now_s=times[-1] + 1, within_s=5)
    assert newest == {"a": sample(2_999)}
    part = read_samples(tmp_path, since_s=times[-1] - 20)
    assert [each.time_s for each in part] == times[-11:]


def test_a_file_that_a_former_attempt_left_too_large_is_thinned(tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl"
    monkeypatch.setattr(module, "_MOST_BYTES", 1 << 30)
    write(path, range(3_000))
    assert path.stat().st_size > 4 * MOST
    monkeypatch.setattr(module, "_MOST_BYTES", MOST)
    write(path, [3_000])
    assert path.stat().st_size <= NEWEST + OLDER
    assert (numbers_of(tmp_path)[0], numbers_of(tmp_path)[-1]) == (0, 3_000)


def test_what_cannot_be_thinned_goes_on_and_is_tried_again(tmp_path, monkeypatch, caplog):
    tried = []

    def fail(path, **_):
        tried.append(path.stat().st_size)
        if len(tried) < 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        thin(path, newest_bytes=NEWEST, older_bytes=OLDER)

    monkeypatch.setattr(module, "thin", fail)
    with caplog.at_level(logging.WARNING):
        write(tmp_path / "a.jsonl", range(600))
    assert len(tried) == 3
    assert tried == pytest.approx([MOST, MOST + NEWEST, MOST + 2 * NEWEST], abs=300)
    assert caplog.text.count("are not thinned out: [Errno 28]") == 2
    found = numbers_of(tmp_path)
    assert (found[0], found[-1]) == (0, 599)


def test_lines_without_a_time_and_one_that_is_too_long_end_nothing(tmp_path):
    path = tmp_path / "a.jsonl"
    long = '{"time_s": 1.0, "node": "' + "n" * 500 + '", "attempt": 0}\n'
    path.write_text(
        "\xff no line of ours\n" + long + '{"time_s": 2.0, "node": "a", "attempt": 0}\n'
    )
    thin(path, newest_bytes=10, older_bytes=100)
    assert path.read_text() == long


def test_a_half_written_end_is_kept_for_its_writer(tmp_path):
    path = tmp_path / "a.jsonl"
    write(path, range(50))
    with path.open("ab") as file:
        file.write(b'{"time_s": 1')
    thin(path, newest_bytes=1_000, older_bytes=500)
    assert path.read_bytes().endswith(b'}\n{"time_s": 1')
    write(path, [50])
    assert numbers_of(tmp_path)[-2:] == [49, 50]
