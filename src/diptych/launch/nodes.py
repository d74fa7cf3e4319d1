"""Ranks on machines that a person can reach: one command for each, printed or run over ssh.

The driver follows from the run's folder, where every node writes a note, and shows by touching it
that it is alive. A node whose note has not been touched for a minute is taken for lost.
"""

from __future__ import annotations

import os
import shlex
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from diptych.core.errors import ConfigError, RunError
from diptych.core.records import Launched, LaunchSpec, NodeNote, RunSpec
from diptych.launch import process
from diptych.launch.node import STOPPED
from diptych.monitor.run_folder import RunFolder

LOST_AFTER_S = 60.0
_KILL_GRACE_S = 30.0
_OWN_WORDS_S = 10.0
"""A node that gives up says why; so long it is waited for."""
_POLL_S = 0.5


class NodesJob:
    """Nodes by their notes, and the ssh clients that started them, if any."""

    def __init__(
        self,
        folder: RunFolder,
        *,
        launch: LaunchSpec,
        name: str,
        commands: Sequence[str],
        clients: Mapping[int, process.Child],
    ) -> None:
        self.job_id: str | None = name
        self.outlives = not clients
        self._folder = folder
        self._launch = launch
        self._name = name
        self._clients = clients
        self._unsaid = list(commands)
        self._started_s = time.monotonic()
        self._signs: dict[str, tuple[float, float]] = {}
        self._said: dict[str, str] = {}
        self._why = ""

    def poll(self) -> int | None:
        """Return how the nodes have ended, once too few are left to go on."""
        most = self._launch.num_nodes or 1
        least = self._launch.min_nodes or most
        notes = self._folder.read_nodes(self._name)
        gone = [note for note in notes if self._state(note) != "going"]
        unborn = [number for number in self._clients if self._died_early(number, notes=notes)]
        num_gone = len(gone) + len(unborn)
        if num_gone and num_gone == len(notes) + len(unborn) and self._ends(gone, most=most):
            return self._code(gone, unborn=unborn)
        # A stop is heeded by all in time; another end leaves the rest waiting for that node.
        has_failed = unborn or any(note.exit_code not in (0, STOPPED) for note in gone)
        if has_failed and most - num_gone < least:
            return self._code(gone, unborn=unborn)
        return self._give_up(notes, least=least)

    def _ends(self, gone: Sequence[NodeNote], *, most: int) -> bool:
        """Whether it is over where all that came have gone: none is still to come."""
        finished = bool(gone) and all(note.exit_code == 0 for note in gone)
        return finished or len(gone) == most

    def news(self) -> list[str]:
        """Say which nodes came, ended or were lost; first of all what a person has to run."""
        lines, self._unsaid = self._unsaid, []
        for note in self._folder.read_nodes(self._name):
            state = self._state(note)
            text = {
                "going": f"node {note.name} has joined ({note.address})",
                "lost": f"node {note.name} is lost: no sign of it for {LOST_AFTER_S:.0f} s",
                "ended": note.error or f"node {note.name} has ended (exit code {note.exit_code})",
            }[state]
            if self._said.get(note.name) != state:
                self._said[note.name] = state
                lines.append(text)
        return lines

    def end(self) -> None:
        """Ask the nodes that remain to leave; those over ssh are ended."""
        if any(self._state(note) == "going" for note in self._folder.read_nodes(self._name)):
            self._folder.stop.touch()
        for client in self._clients.values():
            process.end(client, grace_s=_KILL_GRACE_S)

    def why(self) -> str:
        """Say which nodes did not come, or how they ended."""
        return self._why

    def _state(self, note: NodeNote) -> str:
        """Return going, ended or lost; lost is by this machine's clock alone."""
        if note.exit_code is not None:
            return "ended"
        try:
            touched_s = self._folder.node_path(note.name).stat().st_mtime
        except OSError:
            touched_s = 0.0
        before_s, seen_s = self._signs.get(note.name, (-1.0, 0.0))
        if touched_s != before_s:
            seen_s = time.monotonic()
            self._signs[note.name] = (touched_s, seen_s)
        return "lost" if time.monotonic() - seen_s > LOST_AFTER_S else "going"

    def _died_early(self, number: int, *, notes: Sequence[NodeNote]) -> bool:
        """Whether an ssh client has ended and its node never came."""
        ended = self._clients[number].poll() is not None
        return ended and not any(note.number == number for note in notes)

    def _code(self, gone: Sequence[NodeNote], *, unborn: Sequence[int]) -> int:
        codes = [note.exit_code for note in gone if note.exit_code]
        lost = [note.name for note in gone if note.exit_code is None]
        if lost:
            self._why = f"No sign of {', '.join(lost)} for {LOST_AFTER_S:.0f} s."
        if unborn:
            hosts = self._launch.nodes.hosts
            names = ", ".join(hosts[number] for number in unborn)
            self._why = f"{names} could not be started; launcher-ssh-*.log has what ssh said."
        refused = [note.error for note in gone if note.error]
        if refused:
            self._why = "\n".join(refused)
        # What failed says more than what was stopped because of it.
        failed = [code for code in codes if code != STOPPED]
        return next(iter([*failed, *codes]), 1 if lost or unborn else 0)

    def _give_up(self, notes: Sequence[NodeNote], *, least: int) -> int | None:
        """Return a code where nodes have not come in time."""
        waited_s = time.monotonic() - self._started_s
        if len(notes) >= least or waited_s < self._launch.start_timeout_s + _OWN_WORDS_S:
            return None
        came = ", ".join(note.name for note in notes) or "none"
        self._why = (
            f"{len(notes)} of {self._launch.num_nodes} nodes came within "
            f"{self._launch.start_timeout_s:g} s: {came}. See that the others run their command, "
            "reach the meeting point and see the run's folder."
        )
        return 1


def check(spec: RunSpec) -> str:
    """Look whether as many hosts are named as there are nodes.

    Raises:
        ConfigError: they are not, or ssh has none.
    """
    launch = spec.placement.launch
    _check_hosts(launch)
    return ", ".join(launch.nodes.hosts) or f"{launch.num_nodes or 1}, started by hand"


def start(spec: RunSpec, *, folder: RunFolder, logs: Path) -> NodesJob:
    """Start the nodes over ssh, or say what to run on each.

    Raises:
        ConfigError: the hosts are not as many as the nodes, or ssh has none.
    """
    launch = spec.placement.launch
    _check_hosts(launch)
    lines = [
        node_command(launch, run=folder.path, logs=logs, number=number)
        for number in range(launch.num_nodes or 1)
    ]
    clients: dict[int, process.Child] = {}
    if launch.nodes.start == "ssh":
        for number, (host, line) in enumerate(zip(launch.nodes.hosts, lines, strict=True)):
            clients[number] = process.start(
                [*shlex.split(launch.nodes.ssh), host, line],
                env=os.environ,
                log=logs / f"launcher-ssh-{host}.log",
            )
        lines = [f"starts {len(lines)} nodes over ssh: {', '.join(launch.nodes.hosts)}"]
    else:
        lines = _ask(launch, lines=lines)
    return NodesJob(folder, launch=launch, name=logs.name, commands=lines, clients=clients)


def attach(launched: Launched, *, folder: RunFolder) -> NodesJob | None:
    """Follow nodes that were started by hand and go on; wait for the end of those over ssh.

    Nodes over ssh end with the driver that started them, once they have saved.
    """
    name = Path(launched.logs).name
    launch = folder.read_spec().placement.launch
    job = NodesJob(folder, launch=launch, name=name, commands=(), clients={})
    deadline = time.monotonic() + LOST_AFTER_S + 1.0
    while time.monotonic() < deadline:
        going = [note for note in folder.read_nodes(name) if note.exit_code is None]
        if not [note for note in going if job._state(note) == "going"]:
            return None
        if launch.nodes.start == "print" and any(_is_fresh(folder, note=note) for note in going):
            return job
        time.sleep(_POLL_S)
    return None


def cancel_pending(launched: Launched) -> bool:
    """Nodes that wait for others heed the request to stop by themselves."""
    return False


def node_command(launch: LaunchSpec, *, run: Path, logs: Path, number: int) -> str:
    """Return a node's command, for its shell."""
    nodes = launch.nodes
    folder = nodes.folder or os.getcwd()
    first = nodes.address or (nodes.hosts[0] if nodes.hosts else socket.gethostname())
    words = [
        *(["env", f"PYTHONPATH={os.environ['PYTHONPATH']}"] if "PYTHONPATH" in os.environ else []),
        nodes.python or sys.executable,
        "-m",
        "diptych.launch.node",
        _within(run, folder=folder),
        _within(logs, folder=folder),
        "--meet",
        f"{first}:{nodes.port}",
        "--node",
        str(number),
    ]
    if nodes.hosts:
        words += ["--name", nodes.hosts[number]]
    return f"cd {shlex.quote(folder)} && exec {shlex.join(words)}"


def _within(path: Path, *, folder: str) -> str:
    """Write a path as the nodes have it: relative where it lies in the project's folder."""
    try:
        return path.absolute().relative_to(Path.cwd()).as_posix()
    except ValueError:
        return str(path)


def _check_hosts(launch: LaunchSpec) -> None:
    nodes, count = launch.nodes, launch.num_nodes or 1
    if nodes.start == "ssh" and not nodes.hosts:
        raise ConfigError(
            "train.launch.nodes.start is ssh, and nodes.hosts names none",
            cure="Name the hosts, or set start: print to start them yourself",
        )
    if nodes.hosts and len(nodes.hosts) != count:
        raise ConfigError(
            f"train.launch.nodes.hosts names {len(nodes.hosts)}, and the run is for {count} nodes",
            cure="Name as many hosts as num_nodes (train.launch, plan.cluster)",
        )
    bad = [host for host in nodes.hosts if not host or host.startswith("-")]
    if bad:
        raise ConfigError(
            f"train.launch.nodes.hosts names '{bad[0]}', which is no host", cure="Correct its name"
        )
    if len(set(nodes.hosts)) != len(nodes.hosts):
        raise ConfigError("train.launch.nodes.hosts names a host twice", cure="Name each once")


def _ask(launch: LaunchSpec, *, lines: Sequence[str]) -> list[str]:
    """Write down what a person runs, each on its machine."""
    hosts = launch.nodes.hosts or tuple(f"node {number}" for number in range(len(lines)))
    asked = [f"run this on {host}:\n  {line}" for host, line in zip(hosts, lines, strict=True)]
    return [*asked, f"waiting up to {launch.start_timeout_s:g} s for {len(lines)} nodes"]


def _is_fresh(folder: RunFolder, *, note: NodeNote) -> bool:
    """Whether a node has just shown that it is alive, by the clock of the folder's disk."""
    probe = folder.path / ".probe"
    try:
        probe.write_bytes(b"now")
        now_s = probe.stat().st_mtime
        return now_s - folder.node_path(note.name).stat().st_mtime < LOST_AFTER_S
    except OSError as error:
        raise RunError(
            f"{folder.path} cannot be written to ({error})", cure="Free some room on its disk"
        ) from None
    finally:
        probe.unlink(missing_ok=True)
