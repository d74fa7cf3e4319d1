"""Versions with known holes, by faked metadata; what is older than what, by hand."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.version import Version

from diptych.core.errors import ConfigError
from diptych.core.floors import FLOORS, check_floors

GOOD = {"torch": "2.14.1+cu130", "transformers": "5.24.0", "pillow": "13.0.0", "pyarrow": "22.0.0"}


def versions(**changed: str):
    known = {**GOOD, **changed}

    def version_of(name: str) -> str:
        if name not in known:
            raise metadata.PackageNotFoundError(name)
        return known[name]

    return version_of


def test_what_is_installed_is_run_with() -> None:
    check_floors()
    check_floors(versions())


def test_what_is_not_installed_reads_nothing() -> None:
    check_floors(lambda name: versions()("nothing"))


@pytest.mark.parametrize(
    ("package", "version"),
    [
        ("torch", "2.9.1"),
        ("torch", "2.9.1+cu128"),
        ("torch", "1.13"),
        ("torch", "2.10.0rc1"),
        ("torch", "2.10.0.dev20260101+cpu"),
        ("torch", "2"),
        ("transformers", "5.4.9"),
        ("transformers", "4.57.1"),
        ("transformers", "5.5.0.dev0"),
        ("pillow", "12.2.0"),
        ("pillow", "9.5.0"),
        ("pyarrow", "14.0.0"),
        ("pyarrow", "unheard of"),
    ],
)
def test_an_older_version_is_refused(package: str, version: str) -> None:
    floor = next(each for each in FLOORS if each.package == package)
    with pytest.raises(ConfigError) as caught:
        check_floors(versions(**{package: version}))
    words = str(caught.value)
    assert f"{package} {version} is older than {floor.version}" in words
    assert floor.hole in words
    assert words.endswith(f"pip install '{package}>={floor.version}'")
    if version[0].isdigit():  # as others compare
        assert Version(version) < Version(floor.version)


@pytest.mark.parametrize(
    ("package", "version"),
    [
        ("torch", "2.10"),
        ("torch", "2.10.0"),
        ("torch", "2.10.0+cpu"),
        ("torch", "2.10.0.post1"),
        ("torch", "2.10.0a0+nv26.01"),
        ("torch", "10.0"),
        ("transformers", "5.5.0"),
        ("transformers", "6.0.0.dev0"),
        ("pillow", "12.3"),
        ("pillow", "12.3.0"),
        ("pyarrow", "14.0.1"),
    ],
)
def test_the_floor_and_what_is_newer_are_not(package: str, version: str) -> None:
    if "a0" in version:  # NVIDIA's containers: before the release, and refused as such
        with pytest.raises(ConfigError):
            check_floors(versions(**{package: version}))
    else:
        check_floors(versions(**{package: version}))


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(ConfigError, match=r"(?s)torch 2\.1.*pillow 9\.0") as caught:
        check_floors(versions(torch="2.1", pillow="9.0"))
    assert "pip install 'torch>=2.10' 'pillow>=12.3'" in str(caught.value)


def test_nothing_is_imported() -> None:
    code = (
        "import sys; from diptych.core.floors import check_floors; check_floors();"
        "sys.exit(bool({'torch', 'transformers', 'PIL', 'pyarrow'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_driver_and_the_ranks_ask(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from diptych import hooks, worker

    for module, start in (
        (hooks, hooks.ProjectHooks().after_context_created),
        (worker, lambda: worker.run_training(tmp_path)),
    ):
        monkeypatch.setattr(module, "check_floors", lambda: check_floors(versions(torch="2.9.1")))
        with pytest.raises(ConfigError, match=r"torch 2\.9\.1 is older than 2\.10"):
            start()


def test_what_is_asked_for_in_the_project_is_no_older() -> None:
    import tomllib

    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    asked = {
        line.partition(">=")[0]: line.partition(">=")[2].partition(",")[0]
        for line in tomllib.loads(text)["project"]["dependencies"]
    }
    for floor in FLOORS:
        assert Version(asked[floor.package]) >= Version(floor.version)
