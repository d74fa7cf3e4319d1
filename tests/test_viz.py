"""kedro-viz shows the flow, with the loss curve and the scores as previews."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from diptych.pipeline_registry import register_pipelines

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.slow

FIGURES = (
    "bucket_grid",
    "sample_lengths",
    "image_aspects",
    "batch_waste",
    "loss_curve",
    "score_bars",
)

Get = Callable[[str], Any]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the project; the copy has made its figures."""
    root = tmp_path_factory.mktemp("viz") / "a project"
    for name in ("src", "conf"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", ".telemetry"):
        shutil.copy(ROOT / name, root)
    (root / "conf" / "local").mkdir(exist_ok=True)
    (root / "data" / "08_reporting").mkdir(parents=True)
    for name in FIGURES:
        figure = {"data": [{"type": "scatter", "y": [3, 1]}], "layout": {}}
        (root / "data" / "08_reporting" / f"{name}.json").write_text(json.dumps(figure))
    return root


@pytest.fixture(scope="module")
def get(project: Path) -> Iterator[Get]:
    with serving(project) as read:
        yield read


@contextmanager
def serving(root: Path, *options: str) -> Iterator[Get]:
    """Serve a project; yield a reader of the API."""
    port = _free_port()
    command = [sys.executable, "-m", "kedro", "viz", "run", "--no-browser", f"--port={port}"]
    command += options
    with (root / "viz.log").open("wb") as log:
        server = subprocess.Popen(
            command, cwd=root, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )

    def read(path: str) -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as answer:
            body = answer.read().decode()
        return json.loads(body) if path.startswith("/api") else body

    try:
        _wait(lambda: read("/api/main"), log=root / "viz.log")
        yield read
    finally:
        # The server is a child of the command.
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(timeout=30)


def _free_port() -> int:
    """Find a port below 49152, where kedro-viz wants it, outside of what the system hands out."""
    for port in range(23001, 24000):
        with socket.socket() as attempt:
            if attempt.connect_ex(("127.0.0.1", port)) != 0:
                return port
    raise AssertionError("no port is free")


def _wait(attempt: Callable[[], Any], *, log: Path) -> None:
    deadline = time.monotonic() + 120
    while True:
        try:
            attempt()
        except OSError:
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.5)
        else:
            return


def test_the_pipelines_and_nodes_are_there(get: Get):
    shown = get("/api/main")
    assert {each["id"] for each in shown["pipelines"]} == set(register_pipelines())
    tasks = {node["name"] for node in shown["nodes"] if node["type"] == "task"}
    assert len(tasks) == len(register_pipelines()["__default__"].nodes)


def test_figures_are_previewed(get: Get):
    ids = {node["name"]: node["id"] for node in get("/api/main")["nodes"]}
    for name in FIGURES:
        shown = get(f"/api/nodes/{ids[name]}")
        assert shown["preview_type"] == "PlotlyPreview"
        assert shown["preview"]["data"][0]["y"] == [3, 1]


def test_a_stage_is_shown_as_nodes_of_its_own(project: Path):
    with serving(project, "--env=starter_cpu_stages") as read:
        shown = read("/api/main")
    assert "align" in {each["id"] for each in shown["pipelines"]}
    assert {"stages", "stages.align"} <= set(shown["modular_pipelines"])
    tasks = [node for node in shown["nodes"] if node["type"] == "task"]
    within = {node["name"] for node in tasks if "stages.align" in (node["modular_pipelines"] or [])}
    trained = "inspect search pin compose fork launch"
    assert within == {*trained.split(), "write", "verify", "attach"}
    ids = {node["name"]: node["id"] for node in shown["nodes"]}
    release, begin = ids["stages.align.release"], ids["inherit"]
    assert {"source": release, "target": begin} in shown["edges"]
    assert {"source": begin, "target": ids["model_start"]} in shown["edges"]


def test_nobody_who_looks_is_tracked(get: Get):
    assert "heap" not in get("/").lower()
