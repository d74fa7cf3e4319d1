"""Which code and packages are running: git commit, a hash of the training sources, versions."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import diptych
from diptych.core.hashing import sha256_file, sha256_json
from diptych.core.records import Provenance

PACKAGES = ("torch", "transformers", "safetensors", "numpy", "pyarrow", "pillow", "simplejpeg")
# What decides the weights of a run; reports, the Kedro code and the tests do not.
_TRAINING_SOURCES = (
    "core",
    "shape",
    "data",
    "model",
    "parallel",
    "train",
    "assembly.py",
    "worker.py",
)


def read() -> Provenance:
    """Read git, the installed versions and the training sources; what is not known is None."""
    package = Path(diptych.__file__).parent
    commit = _git("rev-parse", "HEAD", folder=package)
    status = _git("status", "--porcelain", "--untracked-files=no", folder=package)
    return Provenance(
        git_commit=commit,
        git_dirty=None if status is None else bool(status),
        source_sha256=hash_sources(),
        versions=read_versions(("diptych", *PACKAGES)),
    )


def read_versions(names: Sequence[str]) -> dict[str, str]:
    """Read the versions of distributions; what is not installed says so."""
    return {name: _version(name) for name in names}


def hash_sources() -> str:
    """Hash the sources that decide a run's weights."""
    package = Path(diptych.__file__).parent
    files = [
        path
        for name in _TRAINING_SOURCES
        for path in ([package / name] if name.endswith(".py") else (package / name).rglob("*.py"))
    ]
    return sha256_json({p.relative_to(package).as_posix(): sha256_file(p) for p in sorted(files)})


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _git(*arguments: str, folder: Path) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
