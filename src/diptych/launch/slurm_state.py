"""What Slurm says of a job: `scontrol show job` in, its state, and lines for people, out.

Parses and words only; asks nothing of Slurm.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_ENDED = {
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY"),
    *("PREEMPTED", "REVOKED", "SPECIAL_EXIT", "TIMEOUT"),
}
_FIELD = re.compile(r"(?:^| )([A-Za-z:]+)=")
_STOPPED = 75
_SETTINGS = "train.launch.slurm"
_SAID = re.compile(r"^(node \S+: \w*Error|srun: error|slurmstepd: error|sbatch: error|slurm\.sh:)")
_HELD = "; `scontrol release {id}` lets it start"
_REASONS = {
    "Priority": "Priority (others come first)",
    "Resources": "Resources (it is next, when nodes are free)",
    "launch_failed_requeued_held": "it could not be started" + _HELD,
    "JobHeldUser": "held by its user" + _HELD,
    "JobHeldAdmin": "held by an administrator",
    "BeginTime": "BeginTime (it was just queued again, or is to begin later)",
}


@dataclass(frozen=True)
class JobState:
    """A job at one look.

    `name` is Slurm's state, `reason` why it waits or ended, `nodes` Slurm's list of nodes.
    """

    name: str
    reason: str = ""
    nodes: str = ""
    num_nodes: int = 0
    exit_code: int = 0
    signal: int = 0
    num_restarts: int = 0
    time_limit: str = ""

    @property
    def has_ended(self) -> bool:
        """Whether it has ended for good: a job that is queued again is none of these."""
        return self.name in _ENDED

    @property
    def code(self) -> int:
        """Return an exit code; never 0 unless the job has ended well."""
        if self.name == "COMPLETED":
            return self.exit_code
        return self.exit_code or (128 + self.signal if self.signal else 1)


def parse(text: str) -> list[dict[str, str]]:
    """Read what `scontrol show --oneliner` prints: one line a record, `Name=value` in it."""
    records = []
    for line in text.splitlines():
        parts = _FIELD.split(line.strip())
        if len(parts) > 1:
            records.append({k: v.strip() for k, v in zip(parts[1::2], parts[2::2], strict=True)})
    return records


def state_of(record: dict[str, str]) -> JobState:
    """Return a job's state from its record."""
    code, _, number = record.get("ExitCode", "0:0").partition(":")
    nodes = record.get("NodeList", "")
    return JobState(
        name=record.get("JobState", "UNKNOWN").split()[0],
        reason=_plain(record.get("Reason", "")),
        nodes=_plain(nodes),
        num_nodes=_number(record.get("NumNodes", "0")),
        exit_code=_number(code),
        signal=_number(number),
        num_restarts=_number(record.get("Restarts", "0")),
        time_limit=record.get("TimeLimit", ""),
    )


def accounted(line: str) -> tuple[JobState, str]:
    """Read a line of `sacct -P -o State,ExitCode,NodeList,Timelimit`; and who cancelled it."""
    state, code, nodes, limit = (line.strip().split("|") + [""] * 4)[:4]
    record = {"JobState": state, "ExitCode": code, "NodeList": nodes, "TimeLimit": limit}
    return state_of(record), state.partition(" by ")[2].strip()


def changes(before: JobState | None, now: JobState, *, job_id: str) -> list[str]:
    """Say what has happened to a job between two looks."""
    lines = []
    if before is not None and now.num_restarts > before.num_restarts:
        lines.append(f"job {job_id} was queued again (restart {now.num_restarts})")
    if before is None or lines or _shown(before) != _shown(now):
        lines += _tell(now, job_id=job_id)
    return lines


def _shown(state: JobState) -> tuple[str, str]:
    return state.name, "" if state.name == "RUNNING" else state.reason


def _tell(now: JobState, *, job_id: str) -> list[str]:
    if now.name == "PENDING":
        reason = _REASONS.get(now.reason, now.reason or "waits its turn").format(id=job_id)
        return [f"job {job_id} is pending: {reason}"]
    if now.name == "RUNNING":
        count = f" ({now.num_nodes} nodes)" if now.num_nodes > 1 else ""
        return [f"job {job_id} is running on {now.nodes}{count}"]
    if now.name == "SUSPENDED":
        return [f"job {job_id} is suspended: {now.reason or 'Slurm gave no reason'}"]
    return []


def cause(state: JobState, *, job_id: str, by: str = "") -> str:
    """Say why a job ended, and what one can do."""
    job = f"Slurm job {job_id}"
    where = f" on {state.nodes}" if state.nodes else ""
    known = {
        "TIMEOUT": f"reached its time limit ({state.time_limit}){where} before the ranks had saved "
        f"and stopped: raise {_SETTINGS}.warn_s, or {_SETTINGS}.time",
        "OUT_OF_MEMORY": f"ran out of memory{where}: raise {_SETTINGS}.memory, or lower the "
        "micro-batch",
        "NODE_FAIL": f"lost a node{where} and was not queued again ({_SETTINGS}.requeue)",
        "BOOT_FAIL": f"had a node that did not start{where}",
        "CANCELLED": f"was cancelled{f' by {by}' if by else ''}{where}",
        "PREEMPTED": f"was preempted{where} and not queued again ({_SETTINGS}.requeue)",
        "DEADLINE": "would not end before its deadline",
    }
    return (
        f"{job} {known[state.name]}" if state.name in known else _ended(state, job=job, where=where)
    )


def _ended(state: JobState, *, job: str, where: str) -> str:
    if state.name == "COMPLETED" and not state.exit_code:
        return f"{job} ended well, but the run's folder does not say that the run is finished"
    if state.exit_code == _STOPPED:
        return f"{job} was stopped{where} and not queued again"
    how = f"signal {state.signal}" if state.signal else f"exit code {state.exit_code}"
    return f"{job} ended with {how}{where}"


def script_words(log: Path, *, all_lines: bool, num_lines: int = 12) -> list[str]:
    """Return the end of what a job's script has printed: all of it, or what are errors."""
    try:
        lines = log.read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return [f"It has left no log {log}: do its nodes see that folder?"] if all_lines else []
    found = [line for line in lines if line.strip() and (all_lines or _SAID.match(line))]
    return found[-num_lines:] if all_lines else found[-4:]


def seconds(limit: str) -> float | None:
    """Return a time limit of Slurm's in seconds, None for none; such as `90`, `04:00:00`, `2-12`.

    Raises:
        ValueError: it is no time limit.
    """
    if limit.upper() in ("UNLIMITED", "INFINITE", "NONE"):
        return None
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", limit.strip())
    if match is None:
        raise ValueError(limit)
    days, *numbers = match.groups()
    first, second, third = (int(number or 0) for number in numbers)
    if days is not None:  # days-hours:minutes:seconds
        return ((int(days) * 24 + first) * 60 + second) * 60 + third
    if numbers[2] is not None:  # hours:minutes:seconds
        return (first * 60 + second) * 60 + third
    return first * 60 + second  # minutes:seconds


def _plain(value: str) -> str:
    value = value.strip()
    return "" if value in ("None", "(null)", "N/A") else value


def _number(text: str) -> int:
    digits = re.match(r"\d+", text)
    return int(digits[0]) if digits else 0
