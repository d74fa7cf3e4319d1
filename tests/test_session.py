"""`kedro run` for real, in a copy of the project: what is skipped, what is refused, what it costs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

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

    def kedro(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "kedro", *arguments],
            cwd=self.root,
            env={**os.environ, "PYTHONPATH": str(self.root / "src"), "COLUMNS": "200"},
            capture_output=True,
            text=True,
            timeout=120,
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
    begin = time.perf_counter()
    assert project.prepare() == ALL_SKIPPED
    assert time.perf_counter() - begin < 5


def test_an_edited_source_file_is_never_skipped(project: Copy):
    path = project.root / "src" / "diptych" / "data" / "bucket.py"
    before = path.read_text()
    path.write_text(before + "# edited\n")
    told = project.prepare()
    assert told["bucket"] == "run: diptych/data/bucket.py changed"
    assert told["fit"] == "skip: unchanged"
    path.write_text(before)
    assert project.prepare()["bucket"] == "run: diptych/data/bucket.py changed"
    assert project.prepare() == ALL_SKIPPED


def test_a_changed_parameter_reruns_what_it_changes(project: Copy):
    told = project.prepare("--params=prepare.shards.max_samples=5")
    assert told["shard"] == "run: prepare.shards.max_samples changed"
    assert told["measure"] == "run: manifest, shards changed"
    assert told["fit"] == "skip: unchanged"
    project.prepare()
    assert project.prepare() == ALL_SKIPPED


def test_changed_raw_bytes_and_a_missing_output_are_noticed(project: Copy):
    (project.root / "data" / "03_primary" / "buckets.json").unlink()
    assert project.prepare()["bucket"] == "run: buckets is missing"
    samples = project.root / "data" / "01_raw" / "mine" / "samples.json"
    samples.write_text(samples.read_text().replace("How bright?", "How light?"))
    told = project.prepare()
    assert told["index"] == "run: raw_samples changed"
    assert told["shard"] == "run: sample_index, raw_samples changed"[:19] or "changed" in told["shard"]
    assert project.prepare() == ALL_SKIPPED


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--pipelines=trian"], "There is no pipeline 'trian'. Did you mean 'train'?"),
        (["--pipeline=trian"], "There is no pipeline 'trian'. Did you mean 'train'?"),
        (["--env=mien"], "There is no recipe 'mien' (--env) in 'conf/'. Did you mean 'mine'?"),
        (["--tags=prepar"], "There is no tag 'prepar'. Did you mean 'prepare'?"),
        (["--nodes=shards"], "There is no node 'shards'. Did you mean 'shard'?"),
        (["--from-nodes=inde"], "There is no node 'inde'. Did you mean 'index'?"),
        (["--params=train.num_step=5"], "Did you mean 'train.num_steps'?"),
        (["--params=trian.num_steps=5"], "'trian' is unknown. Did you mean 'train'?"),
        (["--params=train.num_steps=few"], "'train.num_steps' is 'few': Input should be a valid"),
        (["--pipelines=plan", "--tags=plan"], "has not been made yet. Run what makes it"),
        (["--params=prepare.index.max_aspect=1", "--env=mine"], "DataError: "),
    ],
)
def test_what_cannot_be_is_told_in_a_few_lines(project: Copy, arguments: list[str], message: str):
    if arguments == ["--pipelines=plan", "--tags=plan"]:
        shutil.rmtree(project.root / "data" / "05_model_input" / "sample_costs")
        arguments.append("--nodes=search")
    done = project.kedro("run", *arguments)
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def test_verbose_shows_the_traceback(project: Copy):
    done = project.kedro("run", "--pipelines=trian", "--verbose")
    assert done.returncode == 1
    assert "Traceback" in done.stdout + done.stderr


def test_the_old_spelling_of_pipelines_works(project: Copy):
    done = project.kedro("run", "--pipeline=prepare", "--env=mine", "--nodes=gather")
    assert done.returncode == 0, done.stderr
    assert "deprecated" in done.stderr


def test_another_runner_runs_everything(project: Copy):
    done = project.kedro(
        "run", "--pipelines=prepare", "--env=mine", "--runner=ThreadRunner", "--nodes=index,bucket"
    )
    assert done.returncode == 0, done.stderr
    assert "skip" not in done.stdout + done.stderr


def test_a_run_from_a_folder_within_runs_in_the_project(project: Copy):
    done = subprocess.run(
        [sys.executable, "-m", "kedro", "run", "--pipelines=prepare", "--env=mine"],
        cwd=project.root / "conf",
        env={**os.environ, "PYTHONPATH": str(project.root / "src")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert not (project.root / "conf" / "data").exists()


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
