"""Children end with their parent, and their last words reach the person."""

import os
import subprocess
import sys
import time

import psutil
import pytest

from diptych.core.children import run_modules
from diptych.core.errors import RunError

SLEEPER = """
import sys, time
from pathlib import Path
from diptych.core.children import follow_parent
follow_parent()
Path(sys.argv[1]).write_text(str(__import__("os").getpid()))
time.sleep(60)
"""


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """Modules that a child finds on its path; the folder's name has a space."""
    folder = tmp_path / "some modules"
    folder.mkdir()
    (folder / "sleeper.py").write_text(SLEEPER)
    (folder / "failing.py").write_text("import sys\nprint('first')\nsys.exit('the last word')\n")
    (folder / "writing.py").write_text(
        "import os, sys\nopen(sys.argv[1], 'w').write(os.environ['OMP_NUM_THREADS'])\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return folder


def wait_for(condition, limit_s=20.0):
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


def gone(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_modules_run_side_by_side_with_their_threads(modules, tmp_path):
    targets = [tmp_path / "a", tmp_path / "b"]
    run_modules([["writing", str(target)] for target in targets], what="write", num_threads=3)
    assert [target.read_text() for target in targets] == ["3", "3"]


def test_a_failure_stops_the_others_and_tells_its_last_lines(modules, tmp_path):
    started = time.monotonic()
    with pytest.raises(RunError, match=r"had to do it ended with code 1\.(.|\n)*the last word"):
        run_modules([["sleeper", str(tmp_path / "pid")], ["failing"]], what="do it")
    assert time.monotonic() - started < 30
    if (tmp_path / "pid").exists():
        assert gone(int((tmp_path / "pid").read_text()))


def test_a_child_that_takes_too_long_is_stopped(modules, tmp_path):
    path = tmp_path / "pid"
    with pytest.raises(RunError, match=r"had to sleep took longer than 1 s"):
        run_modules([["sleeper", str(path)]], what="sleep", limit_s=1.0)
    assert not path.exists() or gone(int(path.read_text()))


def test_a_child_ends_when_its_parent_is_killed(modules, tmp_path):
    code = (
        "from diptych.core.children import run_modules\n"
        f"run_modules([['sleeper', {str(tmp_path / 'pid')!r}]], what='sleep')\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], env=dict(os.environ))
    wait_for((tmp_path / "pid").exists)
    wait_for(lambda: (tmp_path / "pid").read_text())
    child = int((tmp_path / "pid").read_text())
    assert not gone(child)
    parent.kill()
    parent.wait()
    wait_for(lambda: gone(child))
