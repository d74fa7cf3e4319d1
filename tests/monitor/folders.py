"""Folders of runs as ranks and launchers leave them, without any rank."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from tests.launch.test_progress import record


def make_run(
    runs: Path,
    name: str,
    *,
    state: str | None = "running",
    num_records: int = 3,
    moved_s: float | None = None,
    launched: dict[str, Any] | None = None,
    run: dict[str, Any] | None = None,
) -> Path:
    """Write a run's folder; `moved_s` is the time of all its files."""
    folder = runs / name
    (folder / "logs" / "attempt-000").mkdir(parents=True)
    (folder / "checkpoints").mkdir()
    (folder / "run_spec.json").write_text(json.dumps({"identity": {"num_steps": 60}}))
    moment = time.time() if moved_s is None else moved_s
    if state is not None:
        (folder / "status.json").write_text(json.dumps({"state": state, "time_s": moment}))
    facts = {
        "kind": "local",
        "job_id": None,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "started_s": time.time(),
        "logs": "logs/attempt-000",
        **(launched or {}),
    }
    (folder / "launch.json").write_text(json.dumps(facts))
    with (folder / "steps.jsonl").open("w") as steps:
        for step in range(1, num_records + 1):
            heldout = 0.25 if step == 2 else None
            made = record(step, loss=1 / step, heldout_loss=heldout, tokens_per_s=100.0 * step)
            steps.write(made.model_dump_json() + "\n")
    if run is not None:
        (folder / "run.json").write_text(json.dumps(run))
    if moved_s is not None:
        for path in [*folder.rglob("*"), folder]:
            os.utime(path, (moved_s, moved_s))
    return folder


def write_log(folder: Path, rank: int, text: str, *, launch: int = 0) -> Path:
    """Append to a rank's log."""
    path = folder / "logs" / f"attempt-{launch:03d}" / f"rank-{rank:05d}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(text)
    return path
