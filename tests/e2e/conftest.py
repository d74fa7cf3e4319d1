"""A copy of the project with tiny data and a tiny model, prepared and planned once per session."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import TINY_MODEL

ROOT = Path(__file__).resolve().parents[2]
TINY = {
    "plan": {
        "model": {"sizes": TINY_MODEL.sizes},
        "layout": {"num_processes": 2},
        # The tests look the same on a machine with more cores.
        "cluster": {"num_cores_per_node": 2},
    },
    "train": {
        "num_steps": 60,
        "schedule": {"global_batch": 8, "group": 4, "window_shards": 2},
        "optimizer": {"warmup_steps": 5},
        "checkpoint_every_steps": 20,
        "checkpoint_min_interval_s": 0.0,
        "heldout_every_steps": 30,
        "heldout_max_samples": 16,
    },
    "evaluate": {"num_processes": 1},
}


KEYS = {
    name: f"planted-{name.lower()}-0f9e8d7c6b5a"
    for name in ("WANDB_API_KEY", "HF_TOKEN", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
}
"""Secrets that every run here has in its environment, and its project in `conf/local`."""


@dataclass(frozen=True)
class Project:
    """A project folder and how to run Kedro in it."""

    path: Path

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "kedro", "run", "--env=tiny", *arguments]

    @property
    def env(self) -> dict[str, str]:
        return {
            **os.environ,
            **KEYS,
            "PYTHONPATH": str(self.path / "src"),
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "200",
        }

    def run(self, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*arguments),
            cwd=self.path,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
            **options,
        )

    def kedro(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "kedro", *arguments]
        subprocess.run(command, cwd=self.path, env=self.env, check=True, capture_output=True)

    def start_dvc(self) -> None:
        """Make it a DVC project, whose stages find this Python in .venv."""
        subprocess.run(["git", "init", "-q"], cwd=self.path, check=True)
        self.dvc("init", "-q")
        python = self.path / ".venv/bin/python"
        python.parent.mkdir(parents=True)
        python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
        python.chmod(0o755)

    def dvc(self, *arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "dvc", *arguments],
            cwd=self.path,
            env=self.env,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def copy(self, path: Path) -> Project:
        shutil.copytree(self.path, path, symlinks=True)
        return Project(path)


def copy_sources(path: Path) -> None:
    """Copy what a clone has, without data, into a folder."""
    for name in ("src", "conf"):
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "local")
        shutil.copytree(ROOT / name, path / name, ignore=ignored)
    (path / "conf" / "local").mkdir()
    (path / "conf" / "local" / "credentials.yml").write_text(yaml.safe_dump({"keys": KEYS}))
    for name in ("pyproject.toml", "dvc.yaml", ".gitignore", "README.md"):
        shutil.copy(ROOT / name, path / name)
    (path / "pipelines").symlink_to("src/diptych/pipelines")
    for folder in (ROOT / "data").iterdir():
        if folder.is_dir() and folder.name[0].isdigit():
            (path / "data" / folder.name).mkdir(parents=True)


def write_tiny_recipe(project: Path, *, raw: Path) -> None:
    """Write the recipe `tiny`: small data, small model, few steps."""
    sources = {
        "digits": None,
        "strips": {"kind": "llava", "path": str(raw / "train.json"), "split": "train"},
        "others": {"kind": "llava", "path": str(raw / "heldout.json"), "split": "heldout"},
    }
    recipe = {**TINY, "prepare": {"sources": sources, "shards": {"max_samples": 16}}}
    folder = project / "conf" / "tiny"
    folder.mkdir()
    for name, section in recipe.items():
        (folder / f"parameters_{name}.yml").write_text(yaml.safe_dump({name: section}))


@pytest.fixture(scope="session")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A project whose prepare and plan pipelines have run; copy it before changing it."""
    from diptych.data.sources.starter import build_starter

    root = tmp_path_factory.mktemp("e2e")
    raw = build_starter(root / "raw", num_train=80, num_heldout=24, seed=0)
    # A space in the path must never matter.
    path = root / "a project"
    path.mkdir()
    copy_sources(path)
    write_tiny_recipe(path, raw=raw)
    project = Project(path)
    done = project.run("--pipelines=plan")
    assert done.returncode == 0, done.stdout + done.stderr
    return project
