"""The whole workflow on tiny data: what a person runs, and what is left behind."""

from __future__ import annotations

import json
import os
import re
import shutil

import pytest

from tests.e2e.conftest import KEYS, ROOT

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def finished(planned, tmp_path_factory):
    project = planned.copy(tmp_path_factory.mktemp("whole") / "a project")
    done = project.run()
    assert done.returncode == 0, done.stdout + done.stderr
    return project, done.stdout


def test_the_summary_has_every_number(finished):
    project, console = finished
    summary = json.loads((project.path / "data/08_reporting/summary.json").read_text())
    assert summary["num_steps"] == 60
    assert summary["parity_max_abs"] <= 1e-5
    assert 0 <= summary["read_exact_match_low"] <= summary["read_exact_match"]
    assert summary["run_s"] > 10
    assert summary["exact_match_low"] <= summary["exact_match"] <= summary["exact_match_high"]
    assert all(value is not None for value in summary.values())
    for text in ("exact match", "parity", "time", "report.html"):
        assert text in console


def test_a_second_run_skips_everything_that_has_not_changed(finished):
    project, _ = finished
    done = project.run()
    assert done.returncode == 0, done.stderr
    console = done.stdout + done.stderr
    names = set(re.findall(r"^[\d:]+  run (\w+): ", console, flags=re.MULTILINE))
    assert names == {"gather", "survey", "pin", "fork"}, console
    assert "skip launch: unchanged" in console
    assert "skip draw: unchanged" in console


def test_another_rate_is_another_run(finished, tmp_path):
    project = finished[0].copy(tmp_path / "a project")
    done = project.run("--pipelines=train", "--params=train.optimizer.lr=0.002,train.num_steps=20")
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(list((project.path / "data/06_models/runs").iterdir())) == 2


def test_no_output_names_the_machine(finished):
    project, _ = finished
    secrets = [str(project.path).encode(), str(ROOT).encode()]
    for folder in ("06_models/release", "08_reporting", "05_model_input"):
        for path in (project.path / "data" / folder).rglob("*"):
            if path.is_file():
                data = path.read_bytes()
                assert not any(secret in data for secret in secrets), path


def test_no_output_holds_a_key(finished):
    """Logs, checkpoints, lineage, report, release and console; `docs/security.md` promises it."""
    project, console = finished
    keys = [key.encode() for key in KEYS.values()]

    def holders(root):
        return {
            path.relative_to(root).as_posix()
            for path in root.rglob("*")
            if path.is_file() and any(key in path.read_bytes() for key in keys)
        }

    assert holders(project.path / "conf") == {"local/credentials.yml"}, "the search finds them"
    assert holders(project.path / "data") == set()
    assert not any(key in console for key in KEYS.values())
    left = {path.name for path in (project.path / "data").rglob("*") if path.is_file()}
    assert {"report.html", "lineage.json", "summary.json", "attempts.jsonl", "launcher.log"} <= left


@pytest.mark.parametrize("name", ["01_data", "02_run"])
def test_a_notebook_runs(name, finished):
    nbformat = pytest.importorskip("nbformat")
    from nbclient import NotebookClient

    project, _ = finished
    notebook = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)
    folder = project.path / "notebooks"
    folder.mkdir(exist_ok=True)
    client = NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(folder)}})
    environment = dict(os.environ)
    os.environ.update(project.env)
    try:
        client.execute()
    finally:
        os.environ.clear()
        os.environ.update(environment)


@pytest.mark.timeout(900)
@pytest.mark.skipif(shutil.which("git") is None, reason="DVC needs git")
def test_dvc_reruns_only_what_follows_from_a_change(finished, tmp_path):
    project = finished[0].copy(tmp_path / "a project")
    # The recipe's values become the base: DVC reads conf/base.
    import yaml

    for path in (project.path / "conf/tiny").iterdir():
        base = project.path / "conf/base" / path.name
        merged = _merge(yaml.safe_load(base.read_text()), yaml.safe_load(path.read_text()))
        base.write_text(yaml.safe_dump(merged))

    project.start_dvc()
    kedro = (project.path / "dvc.yaml").read_text()
    raw = yaml.safe_load(kedro)
    raw["stages"]["prepare"]["outs"] = [
        out for out in raw["stages"]["prepare"]["outs"] if "starter" not in str(out)
    ]
    (project.path / "dvc.yaml").write_text(yaml.safe_dump(raw))
    first = project.dvc("repro")
    assert "Running stage 'train'" in first
    assert "didn't change" in project.dvc("repro")
    assert "read_exact_match" in project.dvc("metrics", "show")
    train = project.path / "conf/base/parameters_train.yml"
    section = yaml.safe_load(train.read_text())
    section["train"]["num_steps"] = 40
    train.write_text(yaml.safe_dump(section))
    again = project.dvc("repro")
    ran = {line.split("'")[1] for line in again.splitlines() if line.startswith("Running stage")}
    assert ran == {"train", "export", "evaluate", "report"}


def _merge(base, over):
    for key, value in over.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            _merge(base[key], value)
        elif value is None:
            base.pop(key, None)
        else:
            base[key] = value
    return base
