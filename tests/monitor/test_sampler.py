from __future__ import annotations

import errno
import json
import logging
import os
import threading

import pytest

from diptych.core.host import node_name
from diptych.core.records import DeviceSample, NodeSample
from diptych.monitor import sampler as module
from diptych.monitor.sampler import (
    SampleLog,
    Sampler,
    device_entry,
    sample_path,
    start_sampler,
)
from diptych.monitor.samples import parse_samples


def sample(time_s, **fields):
    return NodeSample(time_s=time_s, node="gpu-1", attempt=0, **fields)


def lines(path):
    return path.read_bytes().splitlines()


@pytest.mark.parametrize(
    ("environment", "name"),
    [
        ({"DIPTYCH_NODE": "a", "SLURMD_NODENAME": "b"}, "a"),
        ({"DIPTYCH_NODE": "", "SLURMD_NODENAME": "b"}, "b"),
    ],
)
def test_a_node_has_the_name_that_its_launcher_gave(monkeypatch, environment, name):
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    assert node_name() == name


@pytest.mark.parametrize(
    ("node", "name"),
    [
        ("gpu-1.cluster", "gpu-1.cluster.jsonl"),
        ("../../etc/x", "_.._etc_x.jsonl"),
        ("a b\n", "a_b_.jsonl"),
        ("..", ".jsonl"),
    ],
)
def test_a_node_s_name_leads_out_of_no_folder(tmp_path, node, name):
    assert sample_path(tmp_path, node=node) == tmp_path / name


@pytest.mark.parametrize(
    ("variable", "index", "entry"),
    [(None, 3, "3"), ("4,5", 1, "5"), ("GPU-ab, GPU-cd", 1, "GPU-cd"), ("4", 1, None)],
)
def test_a_rank_s_device_is_named_as_cuda_shows_it(variable, index, entry):
    assert device_entry(variable, index=index) == entry


def test_lines_hold_what_was_measured_alone(tmp_path):
    log = SampleLog(tmp_path / "samples" / "a.jsonl")
    log.write(sample(1.5, cpu_fraction=1 / 3, devices=(DeviceSample(index=0, busy_fraction=0.0),)))
    log.close()
    (line,) = lines(tmp_path / "samples" / "a.jsonl")
    assert json.loads(line) == {
        "time_s": 1.5,
        "node": "gpu-1",
        "attempt": 0,
        "cpu_fraction": 0.333333,
        "devices": [{"index": 0, "busy_fraction": 0.0}],
    }


def test_a_line_that_a_killed_rank_left_half_written_spoils_no_other(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"time_s": 1.0, "node": "gpu-1", "attempt": 0}\n{"time_s": 2.0, "no')
    log = SampleLog(path)
    log.write(sample(3.0))
    log.close()
    assert [each.time_s for each in parse_samples(lines(path))] == [1.0, 3.0]


class FullDisk:
    """A file on a disk that takes a part of a line, then nothing, then all again."""

    def __init__(self, file, *, room):
        self.file, self.room = file, list(room)

    def write(self, data):
        room = self.room.pop(0) if self.room else None
        if room == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return self.file.write(data if room is None else data[:room])

    def close(self):
        self.file.close()


def test_what_a_full_disk_does_not_take_is_dropped_and_counted(tmp_path, caplog):
    path = tmp_path / "a.jsonl"
    log = SampleLog(path)
    log._file = FullDisk(log._file, room=[None, 9, 0])
    with caplog.at_level(logging.WARNING):
        for number in range(5):
            log.write(sample(float(number)))
        log.close()
    assert [each.time_s for each in parse_samples(lines(path))] == [0.0, 3.0, 4.0]
    assert log.num_dropped == 2
    said = [record.message for record in caplog.records]
    assert len(said) == 2
    assert said[1] == "2 samples of this node were not written"


def test_a_look_that_fails_is_said_once_and_the_next_one_is_taken(tmp_path, caplog):
    path, done, number = tmp_path / "a.jsonl", threading.Event(), iter(range(100))

    def look():
        at = next(number)
        if at == 4:
            done.set()
        if at in (1, 2):
            raise RuntimeError("the driver is gone")
        return sample(float(at))

    with caplog.at_level(logging.WARNING):
        sampler = Sampler(SampleLog(path), look=look, every_s=0.001)
        assert done.wait(10)
        sampler.close()
    times = [each.time_s for each in parse_samples(lines(path))]
    assert times[:3] == [0.0, 3.0, 4.0]
    told = [r.message for r in caplog.records]
    assert told == ["a sample of this node failed: RuntimeError: the driver is gone"]
    assert not sampler._thread.is_alive()


def test_this_node_is_sampled_without_devices(tmp_path):
    sampler = start_sampler(
        tmp_path, node="n", attempt=3, every_s=0.01, pids=[os.getpid()], devices=[]
    )
    path = tmp_path / "n.jsonl"
    while not path.exists() or len(lines(path)) < 3:
        pass
    sampler.close()
    found = parse_samples(lines(path))
    assert {each.attempt for each in found} == {3}
    assert all(each.devices == () for each in found)
    assert found[-1].ranks_memory_bytes > 0
    assert found[-1].ranks_cpu_cores is not None


def test_a_driver_that_cannot_be_opened_leaves_devices_out(tmp_path, monkeypatch, caplog):
    def refuse():
        raise ImportError("No module named 'pynvml'")

    monkeypatch.setattr(module, "open_nvml", refuse)
    with caplog.at_level(logging.INFO):
        sampler = start_sampler(
            tmp_path, node="n", attempt=0, every_s=60.0, pids=[os.getpid()], devices=["0"]
        )
        sampler.close()
    assert sampler is not None
    assert any("No module named 'pynvml'" in record.message for record in caplog.records)


def test_a_folder_that_cannot_be_written_starts_no_sampler(tmp_path, caplog):
    (tmp_path / "samples").write_text("a file")
    sampler = start_sampler(
        tmp_path / "samples", node="n", attempt=0, every_s=1.0, pids=[], devices=[]
    )
    assert sampler is None
    assert "this node is not sampled: FileExistsError" in caplog.text
