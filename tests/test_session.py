"""`kedro run` for real, in a copy of the project: what is skipped and refused, what it costs."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kedro.framework.startup import bootstrap_project
from kedro.runner import SequentialRunner, ThreadRunner
from PIL import Image

from diptych.core.errors import ConfigError
from diptych.runner import SkippingRunner
from diptych.session import Session, choose_runner

ROOT = Path(__file__).parent.parent
RECIPE = """
prepare:
  sources:
    digits: null
    mine: {kind: llava, path: data/01_raw/mine/samples.json, heldout_fraction: 0.2}
"""


class Copy:
    """A copy of the project, in a folder with a space, with a few samples of its own."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir()
        for name in ("src", "conf"):
            shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", root)
        (root / "conf" / "local").mkdir(exist_ok=True)
        (root / "conf" / "mine").mkdir()
        (root / "conf" / "mine" / "parameters_prepare.yml").write_text(RECIPE)
        self._bring_samples(root / "data" / "01_raw" / "mine")

    def kedro(self, *arguments: str, folder: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "kedro", *arguments],
            cwd=self.root / folder,
            env={**os.environ, "PYTHONPATH": str(self.root / "src")},
            capture_output=True,
            text=True,
            timeout=200,
        )

    def prepare(self, *more: str) -> dict[str, str]:
        """Run `prepare`; return what was told of each node."""
        done = self.kedro("run", "--pipelines=prepare", "--env=mine", *more)
        assert done.returncode == 0, done.stdout + done.stderr
        lines = [line.split("  ", 1)[-1] for line in (done.stdout + done.stderr).splitlines()]
        told = [line.split(": ", 1) for line in lines if line.startswith(("run ", "skip "))]
        return {place.split()[1]: f"{place.split()[0]}: {why}" for place, why in told}

    def _bring_samples(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        rows = []
        for number in range(20):
            pixels = np.full((24, 32 + number, 3), 10 * number, dtype=np.uint8)
            Image.fromarray(pixels).save(folder / f"{number}.png")
            turns = [
                {"from": "human", "value": "<image>\nHow bright?"},
                {"from": "gpt", "value": str(10 * number)},
            ]
            rows.append({"id": number, "image": f"{number}.png", "conversations": turns})
        (folder / "samples.json").write_text(json.dumps(rows))


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Copy:
    copy = Copy(tmp_path_factory.mktemp("copy") / "a project")
    assert set(copy.prepare().values()) == {
        "run: looks every time",
        "run: no record of an earlier run",
    }
    return copy


ALL_SKIPPED = {
    "gather": "run: looks every time",
    **dict.fromkeys(("index", "bucket", "shard", "fit", "measure"), "skip: unchanged"),
}


def test_a_second_run_skips_everything_within_five_seconds(project: Copy):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert project.prepare() == ALL_SKIPPED
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # Processor time: other tests may be using the cores.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 5


def test_an_edited_source_file_is_never_skipped(project: Copy):
    path = project.root / "src" / "diptych" / "data" / "bucket.py"
    path.write_text(path.read_text() + "# edited\n")
    told = project.prepare()
    assert told.pop("bucket") == "run: diptych/data/bucket.py changed"
    assert told == {name: told for name, told in ALL_SKIPPED.items() if name != "bucket"}


def test_the_old_spelling_a_recipe_and_a_parameter_reach_the_nodes(project: Copy):
    # From a folder within, too: paths are the project's.
    done = project.kedro(
        "run",
        "--pipeline=prepare",
        "--env=mine",
        "--params=prepare.buckets.num_areas=2",
        "--nodes=bucket",
        folder="conf",
    )
    assert done.returncode == 0, done.stderr
    assert "'--pipeline' is deprecated" in " ".join((done.stdout + done.stderr).split())
    buckets = json.loads((project.root / "data" / "03_primary" / "buckets.json").read_text())
    assert len(buckets["areas_px"]) == 1
    assert not (project.root / "conf" / "data").exists()


def test_an_error_is_a_message_and_with_verbose_a_traceback(project: Copy):
    arguments = ["run", "--pipelines=prepare", "--env=mine", "--params=prepare.index.max_aspect=1"]
    done = project.kedro(*arguments)
    assert done.returncode == 1
    assert "DataError: " in done.stderr
    assert "max_quarantined_fraction" in done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    done = project.kedro(*arguments, "--verbose")
    assert done.returncode == 1
    assert "Traceback" in done.stderr


def test_the_package_is_a_command_of_its_own(project: Copy):
    done = subprocess.run(
        [sys.executable, "-m", "diptych", "--pipelines=trian"],
        cwd=project.root,
        env={**os.environ, "PYTHONPATH": str(project.root / "src")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "There is no pipeline 'trian'. Did you mean 'train'?" in done.stderr


@pytest.fixture(scope="module")
def _bootstrapped() -> None:
    bootstrap_project(ROOT)


@pytest.mark.usefixtures("_bootstrapped")
@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"pipeline_names": ["trian"]}, "There is no pipeline 'trian'. Did you mean 'train'?"),
        ({"pipeline_name": "trian"}, "There is no pipeline 'trian'. Did you mean 'train'?"),
        ({"tags": ["prepar"]}, "There is no tag 'prepar'. Did you mean 'prepare'?"),
        ({"node_names": ["shards"]}, "There is no node 'shards'. Did you mean 'shard'?"),
        ({"from_nodes": ["inde"]}, "There is no node 'inde'. Did you mean 'index'?"),
    ],
)
def test_what_is_not_there_is_refused_with_the_nearest(asked: dict[str, Any], message: str):
    session = Session.create(project_path=ROOT, save_on_close=False)
    with pytest.raises(ConfigError, match=re.escape(message)):
        session.run(**asked)


@pytest.mark.usefixtures("_bootstrapped")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"env": "starter_cpu_fsdp"}, "no recipe 'starter_cpu_fsdp' (--env) in 'conf/'. Did you"),
        ({"runtime_params": {"train": {"num_step": 5}}}, "Did you mean 'train.num_steps'?"),
        ({"runtime_params": {"trian": {"num_steps": 5}}}, "'trian' is unknown. Did you mean"),
        ({"runtime_params": {"train": {"num_steps": "few"}}}, "'train.num_steps' is 'few': Input"),
    ],
)
def test_what_cannot_be_set_is_refused_before_anything_runs(options: dict[str, Any], message: str):
    session = Session.create(project_path=ROOT, save_on_close=False, **options)
    with pytest.raises(ConfigError, match=re.escape(message)):
        session.run(pipeline_names=["report"])


def test_only_kedros_default_runner_is_replaced():
    threads = ThreadRunner()
    assert choose_runner(threads, root=ROOT) is threads
    for runner in (None, SequentialRunner(), SequentialRunner(is_async=True)):
        chosen = choose_runner(runner, root=ROOT)
        assert isinstance(chosen, SkippingRunner)
        assert chosen.folder == ROOT / "data" / ".fingerprints"


def test_nobody_who_clones_is_tracked():
    code = (
        "import diptych.settings, os, pathlib\n"
        "from kedro_telemetry.plugin import _check_for_telemetry_consent as consent\n"
        "print(consent(None), os.environ['WANDB_MODE'])\n"
        "del os.environ['DO_NOT_TRACK'], os.environ['KEDRO_DISABLE_TELEMETRY']\n"
        f"print(consent(pathlib.Path({str(ROOT)!r})))\n"
    )
    unset = {"DO_NOT_TRACK", "KEDRO_DISABLE_TELEMETRY", "WANDB_MODE"}
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    assert done.stdout.split() == ["False", "offline", "False"]
