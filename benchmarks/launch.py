"""From the command to the first line of the first rank: `kedro run`, and torchrun alone.

Both start the same run of the starter data, its upstream nodes done before, so that Kedro finds
that nothing of them has changed. Peer: `torchrun` with the worker and a run's folder that is there
already. What is compared is the wall time until the first rank's log has a line, which is after its
imports, its process group and its model. Rounds are interleaved; the goal is a difference in
seconds, which `ratio` holds here.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from diptych.launch.words import rank_log
from run import Measured

NUM_ROUNDS = 5
GOAL_S = 2.0
_LIMIT_S = 120.0
_ROOT = Path(__file__).resolve().parents[1]
_PARAMS = "train.num_steps=2,train.optimizer.warmup_steps=1,train.max_restarts=0"
_RUNS = Path("data/06_models/runs")


def measure(options: argparse.Namespace) -> Measured:
    """Start the same run both ways, in turns."""
    with tempfile.TemporaryDirectory(prefix="diptych-launch-") as name:
        project = Path(name)
        _copy_project(project)
        env = {**os.environ, "PYTHONPATH": str(project / "src")}
        # Where bytecode is kept, as it is unless this says otherwise, sources are compiled once.
        env.pop("PYTHONDONTWRITEBYTECODE", None)
        _run(_kedro(), project=project, env=env)
        spec = next((project / _RUNS).glob("*/run_spec.json")).read_text(encoding="utf-8")
        rounds: dict[str, list[float]] = {"ours": [], "torchrun": []}
        for number in range(NUM_ROUNDS):
            shutil.rmtree(project / _RUNS)
            rounds["ours"].append(_first_line_s(_kedro(), project=project, env=env, find=_newest))
            folder = project / f"alone-{number}"
            folder.mkdir()
            (folder / "run_spec.json").write_text(spec, encoding="utf-8")
            logs = folder / "logs"
            rounds["torchrun"].append(
                _first_line_s(
                    _torchrun(folder, logs=logs),
                    project=project,
                    env={**env, "OMP_NUM_THREADS": "1"},
                    find=lambda _, logs=logs: rank_log(logs, rank=0),
                )
            )
    ours, peer = (statistics.median(rounds[name]) for name in ("ours", "torchrun"))
    return Measured(
        unit="s",
        ours=ours,
        peers={"torchrun": peer},
        ratio=ours - peer,
        goal=f"at most {GOAL_S:g} s more",
        met=ours - peer <= GOAL_S,
        raw={"rounds": rounds},
    )


def _copy_project(project: Path) -> None:
    """Copy what a clone has."""
    for name in ("src", "conf", "data"):
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "local")
        source = _ROOT / name
        if name == "data":
            for folder in source.iterdir():
                if folder.is_dir() and folder.name[0].isdigit():
                    (project / "data" / folder.name).mkdir(parents=True)
        else:
            shutil.copytree(source, project / name, ignore=ignored)
    (project / "conf" / "local").mkdir()
    for name in ("pyproject.toml", "dvc.yaml", "README.md"):
        shutil.copy(_ROOT / name, project / name)
    (project / "pipelines").symlink_to("src/diptych/pipelines")


def _kedro() -> list[str]:
    return [sys.executable, "-m", "kedro", "run", "--pipelines=train", f"--params={_PARAMS}"]


def _torchrun(folder: Path, *, logs: Path) -> list[str]:
    num_ranks = _world_size(folder)
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *(f"--nproc-per-node={num_ranks}", "--module", "diptych.worker", "train"),
        *(str(folder), str(logs)),
    ]


def _world_size(folder: Path) -> int:
    from diptych.monitor.run_folder import RunFolder

    return RunFolder(folder).read_spec().placement.layout.world_size


def _run(command: list[str], *, project: Path, env: Mapping[str, str]) -> None:
    subprocess.run(command, cwd=project, env=dict(env), check=True, stdout=subprocess.DEVNULL)


def _newest(project: Path) -> Path | None:
    found = sorted((project / _RUNS).glob("*/logs/*/rank-00000.log"))
    return found[-1] if found else None


def _first_line_s(
    command: list[str],
    *,
    project: Path,
    env: Mapping[str, str],
    find: Callable[[Path], Path | None],
) -> float:
    """Start a command, take the time until the first rank has said something, let it end."""
    begin = time.perf_counter()
    with subprocess.Popen(
        command, cwd=project, env=dict(env), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        while True:
            log = find(project)
            took_s = time.perf_counter() - begin
            if log is not None and log.exists() and log.stat().st_size:
                break
            assert took_s < _LIMIT_S, "the first rank said nothing"
            assert process.poll() in (None, 0), "the run failed before its first line"
            time.sleep(0.01)
        assert process.wait(_LIMIT_S) == 0, "the run failed"
    return took_s
