from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import torch

import diptych
from diptych.core import provenance


def test_versions_are_those_installed():
    read = provenance.read()
    assert read.versions["torch"] == torch.__version__.split("+")[0]
    assert read.versions["diptych"] == diptych.__version__


def test_the_source_hash_sees_training_code_and_nothing_else(tmp_path):
    source = Path(diptych.__file__).parent
    shutil.copytree(source, tmp_path / "diptych", ignore=shutil.ignore_patterns("__pycache__"))

    def read() -> str:
        code = "from diptych.core import provenance; print(provenance.read().source_sha256)"
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin"},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.strip()

    first = read()
    with (tmp_path / "diptych/report/page.py").open("a") as file:
        file.write("# changed\n")
    assert read() == first
    with (tmp_path / "diptych/train/loop.py").open("a") as file:
        file.write("# changed\n")
    assert read() != first
