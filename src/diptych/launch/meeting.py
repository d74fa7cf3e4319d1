"""Nodes meet: a node says who it is, waits for the first one, and is compared with it.

In: a run's folder that every node sees. Out: a `NodeNote` in it. Starts nothing; no torch.
"""

from __future__ import annotations

import os
import socket
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from diptych.core import provenance
from diptych.core.errors import DiptychError, RunError
from diptych.core.records import NodeNote, RunSpec
from diptych.launch.alike import compare_clocks, compare_code, compare_versions
from diptych.monitor.run_folder import RunFolder

_POLL_S = 0.2
_DIAL_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Own:
    """What a node was told: its name and number, where nodes meet, where logs go."""

    name: str
    number: int
    meet: str
    logs: Path

    @property
    def host_and_port(self) -> tuple[str, int]:
        """The meeting point, taken apart."""
        host, _, port = self.meet.rpartition(":")
        return host, int(port)


def join(folder: RunFolder, *, spec: RunSpec, own: Own, seen: str | None) -> NodeNote:
    """Say that this node takes part; the others first wait for the first node, and compare.

    Args:
        folder: the run's.
        spec: the run's spec.
        own: what this node was told.
        seen: the meeting that this node was at before.

    Raises:
        RunError: the first node does not come, or this one does not go with it.
    """
    note = _introduce(own, meeting="", ahead_s=_clock_ahead_s(folder))
    try:
        note = _meet(folder, spec=spec, own=own, note=note, seen=seen)
    except DiptychError as error:
        # Whoever follows the run reads it, and need not wait for this node.
        folder.write_node(note.model_copy(update={"exit_code": 1, "error": str(error)}))
        raise
    return note


def _introduce(own: Own, *, meeting: str, ahead_s: float) -> NodeNote:
    return NodeNote(
        name=own.name,
        number=own.number,
        launch=own.logs.name,
        meeting=meeting,
        address="",
        host=socket.gethostname(),
        pid=os.getpid(),
        clock_ahead_s=ahead_s,
        provenance=provenance.read(),
    )


def _meet(
    folder: RunFolder, *, spec: RunSpec, own: Own, note: NodeNote, seen: str | None
) -> NodeNote:
    """Find the first node, and write the note of this one."""
    host, port = own.host_and_port
    within_s = spec.placement.launch.start_timeout_s
    first = None
    if own.number == 0:
        _check_port(port, name=own.name)
        count = 0 if seen is None else int(seen.rpartition("-")[2]) + 1
        meeting = f"{spec.run_id}-{own.logs.name}-{count}"
    else:
        first = _await_first(folder, own=own, seen=seen, within_s=within_s)
        _dial(host, port=port, within_s=within_s, name=own.name)
        meeting = first.meeting
    note = note.model_copy(update={"meeting": meeting, "address": own_address(host, port=port)})
    if first is not None:
        check_alike(note, first=first)
    folder.write_node(note)
    return note


def _check_port(port: int, *, name: str) -> None:
    """Refuse a meeting point that something else listens at.

    Raises:
        RunError: it is in use.
    """
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        raise RunError(
            f"Port {port} of node {name}, where nodes meet, cannot be had ({error.strerror})",
            cure="Name another one in train.launch.nodes.port, or end what listens there",
        ) from None


def check_alike(note: NodeNote, *, first: NodeNote) -> None:
    """Refuse a node that would train otherwise than the first, or whose clock is off.

    Raises:
        RunError: names what differs.
    """
    nodes = [
        {
            "node": each.name,
            "code": each.provenance.source_sha256,
            "versions": each.provenance.versions,
        }
        for each in (first, note)
    ]
    clocks = [first.clock_ahead_s, note.clock_ahead_s]
    checks = (
        compare_code(nodes),
        compare_versions(nodes),
        compare_clocks([first.name, note.name], times_s=clocks),
    )
    failed = [check for check in checks if check.status == "fail"]
    if failed:
        raise RunError(
            "; ".join(check.found for check in failed),
            cure="; ".join(check.cure for check in failed),
        )


def own_address(host: str, *, port: int) -> str:
    """Return the address that this machine has towards another: that by which it is reached.

    Raises:
        RunError: the other's name leads nowhere.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing
            return probe.getsockname()[0]
    except OSError as error:
        raise RunError(
            f"The meeting point {host} leads nowhere from {socket.gethostname()} ({error})",
            cure="Give an address that every node reaches",
        ) from None


def _await_first(folder: RunFolder, *, own: Own, seen: str | None, within_s: float) -> NodeNote:
    """Wait for the first node's note of this launch, with a meeting that is a new one.

    Raises:
        RunError: it does not come.
    """
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        notes = folder.read_nodes(own.logs.name)
        if notes and notes[0].number == 0 and notes[0].meeting != seen:
            return notes[0]
        time.sleep(_POLL_S)
    raise RunError(
        f"The first node has not joined {own.logs.name} of run {folder.path.name} within "
        f"{within_s:g} s, as node {own.name} sees it in {folder.nodes}",
        cure="See that the first node runs, and that both see the same folder",
    )


def _clock_ahead_s(folder: RunFolder) -> float:
    """Return by how much this clock is before that of the disk that all nodes share."""
    with tempfile.NamedTemporaryFile(dir=folder.path, prefix=".clock-") as file:
        file.write(b"tick")
        file.flush()
        os.fsync(file.fileno())
        return round(time.time() - os.fstat(file.fileno()).st_mtime, 3)


def _dial(host: str, *, port: int, within_s: float, name: str) -> None:
    """Wait until the first node listens.

    Raises:
        RunError: it does not within so many seconds, or its name leads nowhere.
    """
    deadline = time.monotonic() + within_s
    while True:
        try:
            socket.create_connection((host, port), timeout=_DIAL_S).close()
            return
        except OSError as error:
            if time.monotonic() >= deadline:
                raise RunError(
                    f"Node {name} could not reach the meeting point {host}:{port} "
                    f"within {within_s:g} s ({error})",
                    cure="See that the first node runs, that its name leads to it from here, and "
                    "that no firewall closes the port; train.launch.start_timeout_s waits longer",
                ) from None
        time.sleep(1.0)
