"""A Slurm of this session's own, and runs on its two nodes."""

from __future__ import annotations

import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import psutil
import pytest

from diptych.core.records import LaunchSpec, Layout, RunSpec
from diptych.launch import slurm
from diptych.launch.launch import launch
from diptych.launch.slurm import SlurmJob
from diptych.monitor.run_folder import RunFolder
from tests.conftest import TINY_MODEL, TINY_SCHEDULE
from tests.runs import make_spec
from tests.slurm.cluster import Cluster, missing

LIMIT_S = 90.0
STEPS = {"num_steps": 70, "checkpoint_every_steps": 10000, "heldout_every_steps": 0}
"""No checkpoint is due before the end: what there is was made because somebody asked."""


@pytest.fixture(scope="session")
def _cluster() -> Iterator[Cluster]:
    if lacking := missing():
        pytest.skip(f"no Slurm here ({lacking} missing): apt-get install slurm-wlm munge")
    # A short path: sockets' names have room for 100 characters.
    folder = Path(tempfile.mkdtemp(prefix="dpt-slurm-"))
    cluster = Cluster(folder)
    try:
        cluster.start()
    except BaseException:
        cluster.stop()
        for log in sorted(folder.glob("*.log")):
            print(f"== {log.name}\n{log.read_text()[-2000:]}")
        raise
    yield cluster
    cluster.stop()
    shutil.rmtree(folder)


@pytest.fixture
def cluster(_cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """The cluster, for this process too; a test leaves no job behind."""
    for name in ("SLURM_CONF", "PATH"):
        monkeypatch.setenv(name, _cluster.env[name])
    yield _cluster
    _cluster.clear()


@pytest.fixture
def make_run(corpus: Any) -> Callable[..., RunSpec]:
    """Make the spec of a run on two nodes with a rank each."""
    return functools.partial(make_spec_of, corpus)


def make_spec_of(
    corpus: Any,
    *,
    kind: Literal["local", "slurm"] = "slurm",
    num_nodes: int = 2,
    slurm: dict[str, Any] | None = None,
    **options: Any,
) -> RunSpec:
    spec = make_spec(
        corpus,
        layout=Layout(dp=num_nodes),
        model=TINY_MODEL,
        schedule=TINY_SCHEDULE,
        **{**STEPS, **options},
    )
    launch = LaunchSpec(kind=kind, num_nodes=num_nodes, slurm=slurm or {})
    placement = spec.placement.model_copy(update={"launch": launch})
    return spec.model_copy(update={"placement": placement})


def wait_for(condition: Callable[[], Any], what: str, *, limit_s: float = LIMIT_S) -> Any:
    deadline = time.monotonic() + limit_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited too long for {what}"
        time.sleep(0.1)
    return value


def processes_of(run: Path, *, what: str = "") -> list[str]:
    """The command lines of all processes that work on a run, and have a word in them."""
    found = []
    for process in psutil.process_iter(["pid", "cmdline", "status"]):
        line = process.info["cmdline"] or []
        if (
            process.pid != os.getpid()
            and any(str(run) in part for part in line)
            and what in str(line)
        ):
            found.append(" ".join(line))
    return found


def submit(spec: RunSpec, *, runs: Path) -> tuple[RunFolder, SlurmJob]:
    """Submit a run as `launch` does, without following it."""
    folder = RunFolder(runs / spec.run_id)
    folder.path.mkdir(parents=True)
    folder.write_spec(spec)
    logs = folder.logs / "attempt-000"
    logs.mkdir(parents=True)
    return folder, slurm.start(spec, folder=folder, logs=logs)


def losses(folder: RunFolder) -> list[tuple[int, float | None]]:
    return [(record.step, record.loss) for record in folder.read_steps()]


@pytest.fixture(scope="session")
def expected(
    corpus: Any, tmp_path_factory: pytest.TempPathFactory
) -> list[tuple[int, float | None]]:
    """The losses of two ranks on this machine, without any Slurm."""
    spec = make_spec_of(corpus, kind="local")
    runs = tmp_path_factory.mktemp("local")
    launch(spec, corpus.sample_costs, corpus.shards, str(runs))
    found = losses(RunFolder(runs / spec.run_id))
    assert len(found) == STEPS["num_steps"]
    return found


class Follower:
    """Looks at a job while it waits for something, and keeps the news."""

    def __init__(self, job: SlurmJob, *, folder: RunFolder) -> None:
        self.job = job
        self.folder = folder
        self.news: list[str] = []

    def look(self) -> int | None:
        code = self.job.poll()
        self.news.extend(self.job.news())
        return code

    def wait_for(self, condition: Callable[[], Any], what: str) -> None:
        try:
            wait_for(lambda: (self.look() is not None, condition())[1], what)
        except AssertionError as error:
            log = self.job.log.read_text() if self.job.log.exists() else "no log"
            raise AssertionError(f"{error}; news: {self.news}; log:\n{log}") from None

    def wait_for_step(self, number: int) -> None:
        self.wait_for(lambda: len(self.folder.read_steps()) >= number, f"step {number}")

    def wait_for_attempt(self, number: int) -> None:
        self.wait_for(lambda: self.folder.count_attempts() >= number, f"attempt {number}")

    def wait_for_news(self, words: str) -> None:
        self.wait_for(lambda: any(words in line for line in self.news), words)

    def to_the_end(self) -> int:
        self.wait_for(lambda: self.look() is not None, f"the end of job {self.job.job_id}")
        code = self.look()
        assert code is not None
        return code


_DRIVER = """
import sys
from pathlib import Path
from diptych.core.errors import RunError
from diptych.core.records import RunSpec
from diptych.launch.launch import launch
spec, costs, shards, runs = sys.argv[1:]
try:
    launch(RunSpec.model_validate_json(Path(spec).read_text()), Path(costs), Path(shards), runs)
except RunError as error:
    sys.exit(f"RunError: {error}")
"""


class Driver:
    """A process that launches a run and follows it."""

    def __init__(self, command: list[str], *, log: Path) -> None:
        self._log = log
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )

    def output(self) -> str:
        return self._log.read_text()

    def interrupt(self) -> None:
        self._process.send_signal(signal.SIGINT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def last_words(self) -> str:
        assert self._process.wait(LIMIT_S) != 0
        return self.output()


def start_driver(spec: RunSpec, *, corpus: Any, runs: Path) -> Driver:
    path = runs / "spec.json"
    path.write_text(spec.model_dump_json())
    folders = [str(corpus.sample_costs), str(corpus.shards), str(runs)]
    command = [sys.executable, "-c", _DRIVER, str(path), *folders]
    return Driver(command, log=runs / f"driver-{len(list(runs.glob('driver-*')))}.log")
