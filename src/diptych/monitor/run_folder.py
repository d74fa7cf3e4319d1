"""The files of a run's folder: who writes them, how they are read while they grow.

run_spec.json     the run's spec; the identity part names the folder
attempts.jsonl    one line per start of the ranks: placement, what of it changed, provenance,
                  resumed step, attention, what was last said of the attempt before
what_trains.json  which parameters train and how fast, by tower, as the optimizer has them
steps.jsonl       one `StepRecord` per optimizer step, without gap or repeat
samples/          one `NodeSample` a line, of each node's devices and host, in <node>.jsonl,
                  which stays small: old ones are thinned out
alerts.jsonl      what a person should have looked at, one `Alert` a line
traces/           what profiled steps did, a folder per step
profile           a request to profile some steps, heeded as `stop` is
launch.json       what started the ranks last, and under which id
nodes/            what each node of several said as it joined
preflight.json    what was looked at before its ranks started last, and what was found
ranks.lock        held by the first rank while it lives, with who that is
status.json       what the run is doing, for people and the launcher
stop              a request to save and stop, heeded a step later; made by anyone who may write here
checkpoints/      step-00000100, ...
logs/             what the ranks printed, a file each, per launch
masked-<rank>.jsonl  samples that could not be read during training; -parent: by a fork's parent
run.json          the `Run` record, once the last step is done
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from diptych.core.files import replacing, write_text
from diptych.core.records import Launched, NodeNote, Run, RunSpec, StepRecord, WhatTrains
from diptych.monitor.tails import last_line_begin

_LOG = logging.getLogger(__name__)


class RunFolder:
    """Paths and small files of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.steps = path / "steps.jsonl"
        self.attempts = path / "attempts.jsonl"
        self.checkpoints = path / "checkpoints"
        self.logs = path / "logs"
        self.trains = path / "what_trains.json"
        self.stop = path / "stop"
        self.launched = path / "launch.json"
        self.nodes = path / "nodes"
        self.finished = path / "run.json"
        self.samples = path / "samples"
        self.alerts = path / "alerts.jsonl"
        self.traces = path / "traces"
        self.profile = path / "profile"

    def read_spec(self) -> RunSpec:
        """Read the run's spec."""
        return RunSpec.model_validate_json((self.path / "run_spec.json").read_text("utf-8"))

    def write_spec(self, spec: RunSpec) -> None:
        """Write the run's spec, replacing the one of an earlier attempt."""
        write_text(self.path / "run_spec.json", text=spec.model_dump_json(indent=2) + "\n")

    def read_run(self) -> Run | None:
        """Read the record of a finished run; None while it is not finished."""
        if not self.finished.is_file():
            return None
        return Run.model_validate_json(self.finished.read_text("utf-8"))

    def write_run(self, run: Run) -> None:
        """Write the record that says the run is finished."""
        write_text(self.finished, text=run.model_dump_json(indent=2) + "\n")

    def read_what_trains(self) -> WhatTrains | None:
        """Read what trains; None before the ranks have said it."""
        if not self.trains.is_file():
            return None
        return WhatTrains.model_validate_json(self.trains.read_text("utf-8"))

    def write_what_trains(self, table: WhatTrains) -> None:
        """Write what trains, replacing what an earlier attempt wrote."""
        write_text(self.trains, text=table.model_dump_json(indent=2) + "\n")

    def read_launched(self) -> Launched | None:
        """Read what started the ranks last; None before anything did."""
        if not self.launched.is_file():
            return None
        return Launched.model_validate_json(self.launched.read_text("utf-8"))

    def write_launched(self, launched: Launched) -> None:
        """Write what started the ranks, replacing what was started before."""
        write_text(self.launched, text=launched.model_dump_json(indent=2) + "\n")

    def write_node(self, note: NodeNote) -> None:
        """Write what a node says of itself, replacing what it said before."""
        self.nodes.mkdir(exist_ok=True)
        write_text(self.node_path(note.name), text=note.model_dump_json(indent=2) + "\n")

    def node_path(self, name: str) -> Path:
        """Return where a node's note lies; its time of change is the node's last sign of life."""
        return self.nodes / f"{name}.json"

    def read_nodes(self, launch: str) -> list[NodeNote]:
        """Read the notes of the nodes that joined a launch, by their number."""
        found = []
        for path in self.nodes.glob("*.json"):
            with suppress(OSError, ValidationError):
                note = NodeNote.model_validate_json(path.read_text("utf-8"))
                found += [note] if note.launch == launch else []
        return sorted(found, key=lambda note: note.number)

    def read_status(self) -> dict[str, Any]:
        """Read what the run is doing; empty before the ranks have said anything."""
        try:
            return json.loads((self.path / "status.json").read_text("utf-8"))
        except (OSError, ValueError):
            return {}

    def read_ending(self) -> dict[str, Any]:
        """Read what was last said of ranks that began: a start since then has kept it."""
        status = self.read_status()
        return status.get("former", {}) if status.get("state") == "starting" else status

    def write_status(self, state: str, **facts: Any) -> None:
        """Say what the run is doing: starting, running, stopped, finished or failed."""
        facts = {"state": state, "time_s": round(time.time(), 3), **facts}
        write_text(self.path / "status.json", text=json.dumps(facts) + "\n")

    def append_attempt(self, facts: dict[str, Any]) -> int:
        """Append one attempt, in the place of a line that was cut off; returns its number."""
        lines = self._attempt_lines()
        number = len(lines)
        lines.append(json.dumps({"attempt": number, **facts}) + "\n")
        write_text(self.attempts, text="".join(lines))
        return number

    def read_attempts(self) -> list[dict[str, Any]]:
        """Read what every attempt noted when it began; a last line that was cut off is left out."""
        return [json.loads(line) for line in self._attempt_lines()]

    def first_started_s(self) -> float | None:
        """Return when the first attempt began, in seconds since 1970; None before there is one."""
        attempts = self.read_attempts()
        return float(attempts[0]["started_s"]) if attempts else None

    def count_attempts(self) -> int:
        """Count the attempts so far."""
        return len(self._attempt_lines())

    def _attempt_lines(self) -> list[str]:
        if not self.attempts.exists():
            return []
        lines = self.attempts.read_text("utf-8").splitlines(keepends=True)
        return [line for line in lines if line.endswith("\n")]

    def newest_checkpoint(self) -> int:
        """Return the step of the newest complete checkpoint, 0 before there is one."""
        names = [path.parent.name for path in self.checkpoints.glob("step-*/checksums.json")]
        return max((int(name.removeprefix("step-")) for name in names), default=0)

    def read_steps(self) -> list[StepRecord]:
        """Read the whole step log."""
        return list(iterate_steps(self.steps))

    def cut_steps(self, last_step: int) -> None:
        """Drop records after a step: those of work that a resumed run does again."""
        if not self.steps.exists():
            return
        kept = [record for record in iterate_steps(self.steps) if record.step <= last_step]
        with replacing(self.steps) as partial:
            partial.write_text("".join(r.model_dump_json() + "\n" for r in kept), "utf-8")


def iterate_steps(path: Path) -> Iterator[StepRecord]:
    """Iterate over a step log; a last line that was cut off is left out."""
    if not path.exists():
        return
    for line in path.read_text("utf-8").splitlines(keepends=True):
        if line.endswith("\n"):
            yield StepRecord.model_validate_json(line)


class StepLog:
    """Appends step records; each line is on its way to the disk once it is written.

    Where the disk has no room, lines wait in memory for the next record: training goes on.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)
        self._waiting = b""
        self._failed = False

    def write(self, record: StepRecord) -> None:
        """Append one record."""
        self._waiting += record.model_dump_json().encode() + b"\n"
        try:
            while self._waiting:
                # A disk that is nearly full takes a part.
                self._waiting = self._waiting[self._file.write(self._waiting) :]
            self._failed = False
        except OSError as error:
            if not self._failed:
                _LOG.warning("the step log waits in memory: %s", error)
            self._failed = True

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class StepTail:
    """Reads the records that a growing step log has gained since the last look.

    It begins with the log's start, or with the last record that it ends with now.
    """

    def __init__(self, path: Path, *, begin: Literal["start", "end"] = "start") -> None:
        self._path = path
        self._offset = 0
        self._inode: int | None = None
        if begin == "end" and path.exists():
            self._offset, self._inode = last_line_begin(path), path.stat().st_ino

    def read(self) -> list[StepRecord]:
        """Return new whole lines; a log that was cut (a resume) is read from its start."""
        try:
            inode = self._path.stat().st_ino
        except FileNotFoundError:
            return []
        if inode != self._inode:
            self._offset, self._inode = 0, inode
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        end = data.rfind(b"\n") + 1
        self._offset += end
        return [StepRecord.model_validate_json(line) for line in data[:end].splitlines()]
