"""Folders of runs with all that is observed of them, small ones."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from diptych.core.records import Alert, DeviceSample, NodeSample, Over, StepRecord
from diptych.dashboard.cache import Cache
from diptych.dashboard.logs import Logs
from diptych.dashboard.runs import Runs
from diptych.dashboard.view import Desk
from tests.launch.test_progress import record
from tests.monitor.folders import make_run


def observed(step: int, **fields: Any) -> StepRecord:
    """Make a step's record with what is observed beside the loss."""
    facts = {
        "loss": 4.0 / step,
        "heldout_loss": 2.5 if step % 10 == 0 else None,
        "loss_by_source": {"<b>pages</b>": 1.0 + step, "digits": 2.0},
        "grad_norm_by_tower": {"vision": 0.25, "language": 0.5},
        "time_s": 1.7e9 + step,
        "attempt": 0 if step <= 20 else 1,
        "phases_s": {
            "forward": Over(0.1, 0.2, 0.3, 1),
            "backward": Over(0.2, 0.25, 0.5, 0),
        },
        "mfu": 0.4,
        "memory_bytes": {"peak": Over(1.0, 2.0, 3 * 2.0**30, 1)},
    }
    return record(step, **{**facts, **fields})


def lines(records: list[Any]) -> bytes:
    """Write records as a log has them."""
    return "".join(each.model_dump_json() + "\n" for each in records).encode()


def make_observed(
    runs: Path, name: str, *, num_steps: int = 40, moved_s: float | None = None, **facts: Any
) -> Path:
    """Write a run's folder with steps, samples of one node and an alert."""
    folder = make_run(runs, name, num_records=0, moved_s=moved_s, **facts)
    spec = {"identity": {"num_steps": 60, "optimizer": {"lr": 1e-3}, "seed": len(name)}}
    (folder / "run_spec.json").write_text(json.dumps(spec))
    steps = [observed(step) for step in range(1, num_steps + 1)]
    (folder / "steps.jsonl").write_bytes(lines(steps))
    (folder / "samples").mkdir()
    (folder / "samples" / "node-0.jsonl").write_bytes(lines([sample(n) for n in range(5)]))
    alert = Alert(time_s=1.7e9, step=7, attempt=0, kind="stall", text="<i>it</i> stalls")
    (folder / "alerts.jsonl").write_bytes(lines([alert]))
    for path in folder.rglob("*") if moved_s is not None else ():
        os.utime(path, (moved_s, moved_s))
    return folder


def sample(number: int, **fields: Any) -> NodeSample:
    """Make a sample of a node with two devices."""
    devices = tuple(
        DeviceSample(
            index=index,
            busy_fraction=0.5 + 0.25 * index,
            power_w=None if index else 300.0,
            throttle_reasons=("power", "heat") if index else (),
        )
        for index in range(2)
    )
    facts = {"time_s": 1.7e9 + number, "node": "node-0", "attempt": 0, "devices": devices}
    return NodeSample(**{**facts, "cpu_fraction": 0.5, **fields})


def make_desk(*folders: Path) -> Desk:
    """Make a desk over folders of runs that keeps nothing."""
    return Desk(Runs(folders, logs=Logs(cache=Cache(None))))
