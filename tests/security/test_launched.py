"""A run on two ranks, as it is launched: what listens, what its files and its workers know."""

from __future__ import annotations

import os
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from diptych.core.records import Layout
from diptych.launch.launch import launch
from tests.conftest import TINY_MODEL, TINY_SCHEDULE
from tests.runs import make_spec
from tests.security.canary import Canary
from tests.security.listening import Listener, listeners

LOOPBACK = {"127.0.0.1", "::1"}
KEYS = {
    name: f"planted-{number}-{os.urandom(8).hex()}"
    for number, name in enumerate(
        (
            "WANDB_API_KEY",
            "HF_TOKEN",
            "HUGGING_FACE_HUB_TOKEN",
            "AWS_ACCESS_KEY_ID",
            "AWS_SECRET_ACCESS_KEY",
            "AWS_SESSION_TOKEN",
            "GH_TOKEN",
        )
    )
}


@dataclass
class Launched:
    """A finished run, and what its processes listened on meanwhile."""

    folder: Path
    seen: set[Listener] = field(default_factory=set)
    at_once: int = 0
    knew: set[str] = field(default_factory=set)


@pytest.fixture(scope="module")
def launched(corpus: Any, tmp_path_factory: pytest.TempPathFactory) -> Launched:
    runs = tmp_path_factory.mktemp("runs")
    layout = Layout(engine="ddp", dp=2, micro_batch=4)
    spec = make_spec(corpus, layout=layout, model=TINY_MODEL, schedule=TINY_SCHEDULE, num_steps=4)
    found = Launched(runs)
    before = listeners(os.getpid())
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            now = listeners(os.getpid()) - before
            found.seen |= now
            found.at_once = max(found.at_once, len(now))
            found.knew |= {name for name, key in KEYS.items() if key in environments()}
            time.sleep(0.05)

    watcher = threading.Thread(target=watch)
    watcher.start()
    with pytest.MonkeyPatch.context() as patch:
        for name, key in KEYS.items():
            patch.setenv(name, key)
        try:
            launch(spec, corpus.sample_costs, corpus.shards, str(runs))
        finally:
            done.set()
            watcher.join()
    return found


def environments() -> str:
    """Read what the processes that were started here have in their environment."""
    texts = []
    for child in psutil.Process().children(recursive=True):
        with suppress(OSError):
            texts.append(Path(f"/proc/{child.pid}/environ").read_text(errors="replace"))
    return "\n".join(texts)


def test_only_loopback_listens(canary: Canary, launched: Launched) -> None:
    """`docs/security.md` declares: the ranks' meeting point, and gloo's port of each rank."""
    with socket.create_server(("0.0.0.0", 0)) as open_to_all:
        canary.shows(Listener("0.0.0.0", open_to_all.getsockname()[1]) in listeners(os.getpid()))
    canary.shows(launched.seen)
    assert launched.at_once <= 1 + 2, "the meeting point, and a port of each rank's gloo"
    assert {listener.address for listener in launched.seen} <= LOOPBACK, launched.seen


def leaks(folder: Path) -> list[str]:
    """Name the files that hold a key, and the key's name."""
    return [
        f"{path.relative_to(folder)}: {name}"
        for path in sorted(folder.rglob("*"))
        if path.is_file()
        for name, key in KEYS.items()
        if key.encode() in path.read_bytes()
    ]


def test_no_key_is_in_what_a_run_leaves(canary: Canary, launched: Launched, tmp_path: Path) -> None:
    """Logs, attempts, steps, the run_spec and the checkpoints, with what they say of the run."""
    canary.shows(launched.knew == set(KEYS))
    (tmp_path / "environment.log").write_text(str(KEYS))
    canary.shows(len(leaks(tmp_path)) == len(KEYS))
    names = {path.name for path in launched.folder.rglob("*")}
    assert {"run_spec.json", "attempts.jsonl", "steps.jsonl", "launcher.log", "state.json"} <= names
    assert leaks(launched.folder) == []
