"""Slurm's own commands, asked as a person would: one function each, their errors in their words.

Knows the commands and how they fail; nothing of runs.
"""

from __future__ import annotations

import os
import pwd
import re
import shutil
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from diptych.core.errors import RunError
from diptych.launch.slurm_state import JobState, accounted, parse, state_of

_COMMANDS = ("sbatch", "scontrol", "squeue", "scancel")
_ANSWER_S = 60.0
_UNKNOWN = "Invalid job id"
_KEPT = re.compile(r"SLURM_CONF")
_WHERE_SET = {
    "ACCOUNT": "account",
    "PARTITION": "partition",
    "CONSTRAINT": "constraint",
    "TIMELIMIT": "time",
    "MEM_PER_NODE": "memory",
}
_ALWAYS = {
    *("ARRAY_INX", "CPUS_PER_TASK", "ERROR", "GPUS_PER_NODE", "JOB_NAME", "NO_KILL", "NO_REQUEUE"),
    *("OPEN_MODE", "OUTPUT", "REQUEUE", "SIGNAL", "WAIT"),
}
"""sbatch's variables, by their names behind SBATCH_, that would win over the script."""


class Asked:
    """A command that was started, and is read once it has ended; nobody waits for it."""

    def __init__(self, *command: str) -> None:
        # In a session of its own: Ctrl-C is not meant for it.
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def has_answered(self) -> bool:
        """Whether it has ended."""
        return self._process.poll() is not None

    def answer(self, *, within_s: float = _ANSWER_S) -> tuple[bool, str]:
        """Wait for it; return whether it went well, and what it said."""
        try:
            out, err = self._process.communicate(timeout=within_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
            return False, f"no answer within {within_s:g} s"
        well = self._process.returncode == 0
        return well, (out if well else f"{err}{out}").strip()


def need_slurm() -> None:
    """Refuse where Slurm's commands are missing, or its controller does not answer.

    Raises:
        RunError: one of the two.
    """
    missing = [name for name in _COMMANDS if shutil.which(name) is None]
    if missing:
        raise RunError(
            f"train.launch.kind is slurm, and {', '.join(missing)} cannot be found",
            allowed="Slurm's commands are on a cluster's login nodes",
            cure="Start from a login node, or set train.launch.kind to local, nodes or ray",
        )
    well, said = Asked("scontrol", "ping").answer()
    if not well or "UP" not in said:
        raise RunError(
            f"Slurm's controller does not answer: {_on_one_line(said)}",
            cure="Ask the cluster's administrators, or wait; `scontrol ping` shows when it is back",
        )


def partitions() -> dict[str, dict[str, str]]:
    """Return what Slurm says of each partition, by its name."""
    well, said = Asked("scontrol", "show", "partition", "--oneliner").answer()
    return {record["PartitionName"]: record for record in parse(said)} if well else {}


def submit(script: Path, *, set_here: Mapping[str, object]) -> str:
    """Submit a batch script; return the job's id.

    Args:
        script: its path.
        set_here: settings by name; sbatch's variables for those that have a value are left out, for
            sbatch would put them above what the script says.

    Raises:
        RunError: sbatch refuses it.
    """
    done = subprocess.run(
        ["sbatch", "--parsable", str(script)],
        env=environment(os.environ, set_here=set_here),
        capture_output=True,
        text=True,
        check=False,
        timeout=10 * _ANSWER_S,
    )
    if done.returncode:
        raise RunError(
            f"sbatch refuses {script}: {_on_one_line(done.stderr or done.stdout)}",
            cure="Correct train.launch.slurm (account, partition, time, options, ...), or submit "
            f"the script by hand to try: sbatch {script}",
        )
    # <id> or <id>;<cluster>
    return done.stdout.strip().splitlines()[-1].partition(";")[0]


def environment(present: Mapping[str, str], *, set_here: Mapping[str, object]) -> dict[str, str]:
    """Return the environment to submit from: a job's own variables of this process are left out.

    A driver that runs inside a job has SLURM_MEM_PER_NODE and such, which a new job inherits.
    """
    overridden = _ALWAYS | {name for name, setting in _WHERE_SET.items() if set_here.get(setting)}
    dropped = {f"SBATCH_{name}" for name in overridden}
    return {
        name: value
        for name, value in present.items()
        if name not in dropped and not (name.startswith("SLURM") and not _KEPT.match(name))
    }


def look_later(job_id: str) -> Asked:
    """Begin to ask how a job is."""
    return Asked("scontrol", "show", "job", "--oneliner", job_id)


def read_look(asked: Asked) -> tuple[JobState | None, str]:
    """Return a job's state, or None and why: an empty reason where Slurm has forgotten the job."""
    well, said = asked.answer()
    records = parse(said) if well else []
    if records:
        return state_of(records[0]), ""
    return None, "" if _UNKNOWN in said else _on_one_line(said) or "an empty answer"


def look_back(job_id: str) -> tuple[JobState | None, str]:
    """Ask the accounting for a job that has ended; return its state, and who cancelled it.

    Many clusters keep no accounts.
    """
    if shutil.which("sacct") is None:
        return None, ""
    fields = "State,ExitCode,NodeList,Timelimit"
    well, said = Asked("sacct", "-j", job_id, "-X", "-n", "-P", "-o", fields).answer()
    if not well or not said:
        return None, ""
    state, by = accounted(said.splitlines()[-1])
    if by.isdigit():
        with suppress(KeyError):
            by = pwd.getpwuid(int(by)).pw_name
    return state, by


def queued(name: str, *, project: Path) -> list[str]:
    """Return the ids of this user's jobs of a name, in a folder, that wait or run."""
    user = pwd.getpwuid(os.getuid()).pw_name
    well, said = Asked("squeue", "-h", "-r", "-u", user, "-n", name, "-o", "%i|%Z").answer()
    if not well:
        return []
    rows = [line.partition("|") for line in said.splitlines()]
    return [job_id for job_id, _, folder in rows if folder == str(project)]


def cancel(job_id: str) -> None:
    """Cancel a job: its processes get SIGTERM, and SIGKILL a little later."""
    Asked("scancel", job_id).answer()


def _on_one_line(text: str) -> str:
    return " ".join(line.strip() for line in text.splitlines() if line.strip())
