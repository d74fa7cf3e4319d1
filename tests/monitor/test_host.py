"""This host, looked at for real, with processes whose work is known."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import psutil
import pytest

from diptych.monitor import host as module
from diptych.monitor.host import Host

SPIN = "import time; print('on', flush=True)\nwhile True: pass"
SLEEP = "import time; print('on', flush=True); time.sleep(600)"
# A loader and one of Python's own helpers, which loads nothing.
RANK = """
import subprocess, sys, time
for name in ("loader", "resource_tracker"):
    child = subprocess.Popen(
        [sys.executable, "-c", "print('on', flush=True); import time; time.sleep(600)", name],
        stdout=subprocess.PIPE,
    )
    child.stdout.readline()
print('on', flush=True)
time.sleep(600)
"""


def start(program, *arguments):
    child = subprocess.Popen(
        [sys.executable, "-c", program, *arguments], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout.readline() == "on\n"
    return child


def end(*children):
    for child in children:
        child.kill()
        child.wait()
        child.stdout.close()


def test_loaders_are_the_processes_that_ranks_started(tmp_path):
    rank = start(RANK)
    sleeps, helper = psutil.Process(rank.pid).children()
    try:
        host = Host(pids=[rank.pid], disk=tmp_path, say=pytest.fail)
        sample = host.sample()
        assert sample["num_loaders"] == 1
        both = psutil.Process(rank.pid).memory_info().rss + sleeps.memory_info().rss
        assert sample["ranks_memory_bytes"] == pytest.approx(both, rel=0.05)
        assert sample["disk_free_bytes"] == pytest.approx(
            psutil.disk_usage(str(tmp_path)).free, rel=0.01
        )
        assert sample["memory_total_bytes"] == psutil.virtual_memory().total
    finally:
        sleeps.kill()
        helper.kill()
        end(rank)


def test_busy_cores_are_those_since_the_look_before(tmp_path, monkeypatch):
    rank, seconds = start(SLEEP), iter([0.0, 0.0, 4.0, 4.0])
    used = {rank.pid: 10.0}
    monkeypatch.setattr(module, "_cpu_s", lambda process: used[process.pid])
    try:
        host = Host(pids=[rank.pid], disk=tmp_path, say=pytest.fail, clock=lambda: next(seconds))
        first = host.sample()
        assert (first["ranks_cpu_cores"], first["loaders_cpu_cores"]) == (None, None)
        assert first["cpu_fraction"] is None
        assert first["network_sent_bytes_per_s"] is None
        used[rank.pid] = 16.0
        second = host.sample()
        assert second["ranks_cpu_cores"] == pytest.approx(1.5)
        assert second["loaders_cpu_cores"] == 0.0
        assert second["network_sent_bytes_per_s"] >= 0
    finally:
        end(rank)


def test_a_rank_that_has_ended_is_missing(tmp_path):
    rank = start(SPIN)
    host = Host(pids=[rank.pid], disk=tmp_path, say=pytest.fail)
    host.sample()
    end(rank)
    time.sleep(0.01)
    sample = host.sample()
    assert sample["ranks_memory_bytes"] is None
    assert sample["ranks_cpu_cores"] is None


def test_what_the_system_does_not_say_is_missing_and_said_once(tmp_path, monkeypatch):
    def refuse():
        raise PermissionError("not in this container")

    monkeypatch.setattr(module.psutil, "virtual_memory", refuse)
    monkeypatch.setattr(module.psutil, "disk_io_counters", lambda: None)
    said = []
    host = Host(pids=[os.getpid()], disk=tmp_path, say=said.append)
    for _ in range(3):
        sample = host.sample()
    assert sample["memory_available_bytes"] is None
    assert sample["disk_read_bytes_per_s"] is None
    assert sample["num_cores"] >= 1
    assert said == ["the host does not say memory (PermissionError: not in this container)"]
