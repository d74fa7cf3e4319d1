from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from diptych.launch import process

# Ignores SIGTERM and has a child in a session of its own, as torch elastic's ranks are.
STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
code = "import time; time.sleep(60)"
child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
print(child.pid, flush=True)
time.sleep(60)
"""


def _wait_for(condition, limit_s=10.0):
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


def _gone(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_end_leaves_no_descendant(tmp_path):
    log = tmp_path / "log"
    child = process.start([sys.executable, "-c", STUBBORN], env=os.environ, log=log)
    _wait_for(lambda: log.read_text().strip())
    grandchild = int(log.read_text())
    assert not _gone(grandchild)
    process.end(child, grace_s=0.2)
    assert child.returncode == -signal.SIGKILL
    _wait_for(lambda: _gone(grandchild))


def test_a_child_gets_sigterm_when_its_parent_is_killed(tmp_path):
    log = tmp_path / "log"
    code = f"""
import os, sys, time
from pathlib import Path
from diptych.launch import process
child = process.start([sys.executable, "-c", "import time; time.sleep(60)"], env=os.environ,
                      log=Path({str(log)!r}))
print(child.pid, flush=True)
time.sleep(60)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())
    assert not _gone(child)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    _wait_for(lambda: _gone(child))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_stop_signals_are_counted_and_handlers_come_back(number):
    before = signal.getsignal(number)
    with process.stop_signals() as stops:
        os.kill(os.getpid(), number)
        _wait_for(lambda: stops.count == 1)
    assert stops.name == signal.Signals(number).name
    assert signal.getsignal(number) is before


def test_a_stage_ends_when_dvc_is_killed(tmp_path):
    # A script named dvc starts a shell that starts the stage, as DVC does.
    script = tmp_path / "dvc"
    stage = (
        f'"{sys.executable}" -c \'from diptych.launch.process import end_with_dvc as e; e(); '
        "import os, time; print(os.getpid(), flush=True); time.sleep(60)'"
    )
    script.write_text(
        "import os, subprocess, sys\n"
        "env = {**os.environ, 'DVC_STAGE': 'train'}\n"
        f"subprocess.run(['sh', '-c', {stage!r} + '; true'], env=env)\n"
    )
    dvc = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    pid = int(dvc.stdout.readline())
    dvc.kill()
    dvc.wait()
    dvc.stdout.close()
    _wait_for(lambda: _gone(pid))
