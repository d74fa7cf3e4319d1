"""What leaves the project: a wheel that is whole, an archive without secrets, light workers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SECRET = "hunter2"
SECRETS = (
    "local/credentials.yml",
    "local/credentials.yaml",
    "local/parameters.yml",
    "local/deep/anything.json",
    "prod/credentials.yml",
    "prod/credentials/s3.yml",
    "prod/wandb_credentials.yaml",
)


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("package") / "a project"
    root.mkdir()
    for name in ("src", "conf"):
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / name, root / name, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", root)
    shutil.copy(ROOT / "LICENSE", root)
    (root / "README.md").write_text("Diptych")
    for name in SECRETS:
        (root / "conf" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "conf" / name).write_text(f"password: {SECRET}\n")
    (root / "conf" / "prod" / "parameters.yml").write_text("train: {seed: 1}\n")
    done = subprocess.run(
        [sys.executable, "-m", "kedro", "package"],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root / "src")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return root / "dist"


def test_no_secret_is_in_the_archive(dist: Path):
    with tarfile.open(dist / "conf-diptych.tar.gz") as tar:
        texts = {
            member.name: file.read().decode()
            for member in tar.getmembers()
            if (file := tar.extractfile(member)) is not None
        }
    assert not [name for name, text in texts.items() if SECRET in text]
    assert {"conf/base/catalog.yml", "conf/logging.yml", "conf/prod/parameters.yml"} <= set(texts)


def test_the_wheel_has_all_modules_and_templates_and_no_secret(dist: Path):
    [wheel] = dist.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if name.startswith("diptych/")}
        assert not [name for name in archive.namelist() if SECRET.encode() in archive.read(name)]
    sources = ROOT / "src"
    ours = {
        path.relative_to(sources).as_posix()
        for path in (sources / "diptych").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert packed == ours


def test_a_worker_starts_without_kedro():
    code = (
        "import sys, diptych.worker\n"
        "names = {name.partition('.')[0] for name in sys.modules}\n"
        "print(sorted(names & {'kedro', 'kedro_datasets', 'kedro_viz', 'dvc', 'sklearn',"
        " 'pandas', 'plotly', 'deepspeed', 'wandb'}))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip().splitlines()[-1] == "[]"


def test_what_is_pinned_is_a_name_and_a_version():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert pins
    for pin in pins:
        name, equals, version = pin.partition("==")
        assert equals, pin
        assert all(part.isalnum() for part in name.replace("_", "-").replace(".", "-").split("-"))
        assert version[0].isdigit(), pin
        assert not set(version) & set("/@:;+ "), f"{pin}: no host, no path, no local version"
    assert "torch==2.14.1" in pins
    assert "torchvision==0.29.1" in pins
