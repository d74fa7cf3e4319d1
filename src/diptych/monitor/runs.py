"""Runs as their folders show them: folders of runs in, one row per run out, newest first.

Reads the ends of files only, so hundreds of long runs take a moment; and any folder, however
damaged, is a row. Nothing is written, and no process is asked that is not on this machine.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from diptych.core.errors import RunError, nearest
from diptych.core.records import RunRow, RunState
from diptych.monitor.tails import last_lines, parse_objects

_TAIL_BYTES = 32 * 1024
_HELDOUT_BYTES = 512 * 1024
_RATE_STEPS = 20
_QUIET_S = 900.0
_QUIET_STEPS = 30
_STATES = ("starting", "running", "stopped", "finished", "failed")
_DAMAGE = (OSError, ValueError, TypeError, KeyError, AttributeError)


def list_runs(folders: Sequence[Path], *, now_s: float | None = None) -> list[RunRow]:
    """List the runs in folders of runs, the one that moved last first.

    Args:
        folders: each holds a folder per run; one that is not there holds none.
        now_s: the time, in seconds since 1970.
    """
    now_s = time.time() if now_s is None else now_s
    rows = []
    for folder in folders:
        with suppress(FileNotFoundError, NotADirectoryError):
            for entry in os.scandir(folder):
                if entry.is_dir() and not entry.name.startswith("."):
                    rows.append(read_row(Path(entry.path), now_s=now_s))
    return sorted(rows, key=lambda row: (-(row.moved_s or 0.0), row.run_id))


def read_row(path: Path, *, now_s: float | None = None) -> RunRow:
    """Read one run's row; what is wrong with its folder is in the row."""
    now_s = time.time() if now_s is None else now_s
    # A stage's runs lie in <stages>/<name>/runs.
    is_stages = path.parent.parent.parent.name == "stages"
    stage = path.parent.parent.name if is_stages else None
    try:
        return _read(path, stage=stage, now_s=now_s)
    except _DAMAGE as error:
        told = " ".join(str(error).split())[:200] or type(error).__name__
        moved = None
        with suppress(OSError):
            moved = path.stat().st_mtime
        return RunRow(
            run_id=path.name,
            folder=str(path),
            stage=stage,
            state="damaged",
            moved_s=moved,
            problem=told,
        )


def find_run(name: str, *, folders: Sequence[Path]) -> RunRow:
    """Find the run that a person means: its name, the beginning of it, or `newest`.

    Raises:
        RunError: there is none, or several begin so.
    """
    rows = list_runs(folders)
    where = ", ".join(map(str, folders))
    if not rows:
        raise RunError(f"There is no run in {where}", cure="Train one, or name --runs FOLDER")
    if name == "newest":
        return rows[0]
    exact = [row for row in rows if row.run_id == name]
    found = exact or [row for row in rows if row.run_id.startswith(name)]
    if len(found) != 1:
        raise _unclear(name, found=found, rows=rows, where=where)
    return found[0]


def _unclear(name: str, *, found: Sequence[RunRow], rows: Sequence[RunRow], where: str) -> RunError:
    if found:
        named = ", ".join(row.folder for row in found[:5])
        return RunError(
            f"'{name}' is the beginning of {len(found)} runs: {named}",
            cure="Give more of the name, or --runs FOLDER",
        )
    return RunError(
        f"No run in {where} begins with '{name}'",
        allowed=nearest(name, allowed=[row.run_id for row in rows[:10]]),
        cure="kedro runs lists them",
    )


def _read(path: Path, *, stage: str | None, now_s: float) -> RunRow:
    spec = _load(path / "run_spec.json")
    status = _load(path / "status.json")
    launched = _load(path / "launch.json")
    finished = _load(path / "run.json")
    if not (spec or finished):
        return _without_spec(path, stage=stage, status=status)
    steps = last_lines(path / "steps.jsonl", most_bytes=_TAIL_BYTES)
    records = list(parse_objects(steps[-_RATE_STEPS:]))
    last = records[0] if records else {}
    moved_s = _moved(path, launched=launched, status=status)
    state, problem = _state(
        status, finished=finished, launched=launched, last=last, quiet_s=now_s - moved_s
    )
    return RunRow(
        run_id=path.name,
        folder=str(path),
        stage=stage,
        state=state,
        step=finished.get("num_steps", last.get("step")),
        num_steps=spec.get("identity", finished).get("num_steps"),
        loss=last.get("loss", finished.get("final_loss")),
        heldout_loss=_last_heldout(path / "steps.jsonl", lines=steps, finished=finished),
        tokens_per_s=_mean([each["tokens_per_s"] for each in records if "tokens_per_s" in each]),
        kind=launched.get("kind"),
        job_id=launched.get("job_id"),
        host=launched.get("host"),
        started_s=launched.get("started_s", status.get("time_s")),
        moved_s=moved_s,
        problem=problem,
    )


def _without_spec(path: Path, *, stage: str | None, status: dict[str, Any]) -> RunRow:
    """Describe a folder in which only a preflight was, or nothing that can be read."""
    is_checked = (path / "preflight.json").is_file() and not status
    return RunRow(
        run_id=path.name,
        folder=str(path),
        stage=stage,
        state="checked" if is_checked else "damaged",
        moved_s=path.stat().st_mtime,
        problem=None if is_checked else "run_spec.json is missing",
    )


def _load(path: Path) -> dict[str, Any]:
    """Read a small JSON file; empty where there is none.

    Raises:
        ValueError: it is damaged.
    """
    try:
        text = path.read_text("utf-8")
    except FileNotFoundError:
        return {}
    try:
        value = json.loads(text)
    except ValueError:
        raise ValueError(f"{path.name} cannot be read: it is no JSON") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path.name} cannot be read: it holds no fields")
    return value


def _state(
    status: dict[str, Any],
    *,
    finished: dict[str, Any],
    launched: dict[str, Any],
    last: dict[str, Any],
    quiet_s: float,
) -> tuple[RunState, str | None]:
    said = "finished" if finished else status.get("state")
    if said not in _STATES:
        return "damaged", f"status.json says '{said}'" if said else "status.json is missing"
    if said not in ("starting", "running"):
        return said, None
    if said == "starting" and launched.get("job_id") and not last:
        return "queued", None
    lost = _why_lost(launched, last=last, quiet_s=quiet_s)
    return ("lost", lost) if lost else (said, None)


def _why_lost(launched: dict[str, Any], *, last: dict[str, Any], quiet_s: float) -> str | None:
    if _driver_is_gone(launched):
        return "the process that started it is gone"
    if quiet_s > max(_QUIET_S, _QUIET_STEPS * float(last.get("step_s", 0.0))):
        return "nothing of it has moved since"
    return None


def _driver_is_gone(launched: dict[str, Any]) -> bool:
    """Whether ranks that end with their driver were started here by one that has ended."""
    if launched.get("kind") != "local" or launched.get("host") != socket.gethostname():
        return False
    try:
        began_s = psutil.Process(int(launched["pid"])).create_time()
    except psutil.NoSuchProcess:
        return True
    except psutil.Error:
        return False
    # Another process may have taken the number since.
    return began_s > float(launched["started_s"]) + 1.0


def _moved(path: Path, *, launched: dict[str, Any], status: dict[str, Any]) -> float:
    """Return when a run last moved: its steps, its checkpoints, what its ranks say."""
    files = [path / "steps.jsonl", path / "status.json", path / "checkpoints", path / "run.json"]
    if launched.get("logs"):
        logs = path / str(launched["logs"])
        files += [logs / "rank-00000.log", logs]
    times = [float(status.get("time_s") or 0.0)]
    for file in files:
        with suppress(OSError):
            times.append(file.stat().st_mtime)
    return max(times)


def _last_heldout(path: Path, *, lines: list[bytes], finished: dict[str, Any]) -> float | None:
    """Return the last held-out loss, which stands in one step out of many."""
    if finished.get("final_heldout_loss") is not None:
        return float(finished["final_heldout_loss"])
    for num_bytes in (0, _HELDOUT_BYTES):
        found = last_lines(path, most_bytes=num_bytes) if num_bytes else lines
        for record in parse_objects([each for each in found if b'"heldout_loss":null' not in each]):
            if record.get("heldout_loss") is not None:
                return float(record["heldout_loss"])
    return None


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
