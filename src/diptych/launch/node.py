"""One node's part of a run on several: meet the other nodes, run this node's ranks, end with them.

`python -m diptych.launch.node <run> <logs> --meet host:port --node 0`, started on every node by a
scheduler, by ssh or by a person, in the project's folder. Exit codes: 0 the run is finished,
75 it was stopped and goes on when it is started again, else what torch elastic says.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil

from diptych.core.errors import DiptychError, RunError
from diptych.core.host import NODE_VARIABLE, node_name
from diptych.core.records import NodeNote, RunSpec
from diptych.launch import process
from diptych.launch.elastic import elastic_command
from diptych.launch.meeting import Own, join
from diptych.launch.network import loopback, python_path, rank_environment
from diptych.monitor.run_folder import RunFolder

STOPPED = 75
"""EX_TEMPFAIL of sysexits.h: try again later."""
_LOG = logging.getLogger("diptych.node")
BEAT_EVERY_S = 5.0
_LAST_CALL_S = 15
_SETTLE_S = 20.0
_POLL_S = 0.2
_STOP_GRACE_S = 60.0
_KILL_GRACE_S = 5.0


def main(arguments: list[str] | None = None) -> int:
    """Run one node's part; returns its exit code."""
    parser = argparse.ArgumentParser(prog="diptych.launch.node", description=__doc__)
    parser.add_argument("run", type=Path, help="the run's folder")
    parser.add_argument("logs", type=Path, help="the folder of the ranks' logs")
    parser.add_argument("--meet", required=True, help="host:port of the first node")
    parser.add_argument("--node", type=int, required=True, help="its number; 0 is the first")
    parser.add_argument("--name", default=node_name(), help="of this node, in logs")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    # A scheduler's warning: its script heeds it.
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        return run_node(
            options.run,
            logs=options.logs,
            meet=options.meet,
            number=options.node,
            name=options.name,
        )
    except DiptychError as error:
        sys.stderr.write(f"node {options.name}: {type(error).__name__}: {error}\n")
        return 1
    finally:
        signal.signal(signal.SIGUSR1, before)


def run_node(run: Path, *, logs: Path, meet: str, number: int, name: str) -> int:
    """Run this node's ranks to their end.

    Where nodes come and go (`min_nodes`), ranks save and leave together, and those of the nodes
    that remain meet again.

    Args:
        run: the run's folder, the same on every node.
        logs: the folder of the ranks' logs, within it.
        meet: `host:port` of the first node.
        number: of this node; 0 is the first.
        name: of this node.

    Raises:
        RunError: the folder is not there, the meeting point cannot be reached, or this node's code,
            packages or clock are not the first node's.
    """
    folder = RunFolder(run)
    spec = _read_spec(folder, name=name)
    own = Own(name=name, number=number, meet=meet, logs=logs)
    seen: str | None = None
    with process.stop_signals() as stops:
        while True:
            note = join(folder, spec=spec, own=own, seen=seen)
            code = _run_ranks(folder, spec=spec, own=own, note=note, stops=stops)
            code = _read_end(folder, code=code)
            if code != STOPPED or stops.count or not _others_go_on(folder, spec=spec):
                folder.write_node(note.model_copy(update={"exit_code": code}))
                _conclude(folder, own=own, stopped=bool(stops.count) or folder.stop.exists())
                return code
            seen = note.meeting
            _LOG.info("a node has come or gone: the ranks that remain start again")


def _conclude(folder: RunFolder, *, own: Own, stopped: bool) -> None:
    """Say how a run has ended of which no rank has said anything; a driver may be gone."""
    status = folder.read_status()
    if own.number == 0 and status.get("state") == "starting":
        state = "stopped" if stopped else "failed"
        folder.write_status(state, step=0, num_steps=status.get("num_steps"))


def command(spec: RunSpec, *, run: Path, own: Own, note: NodeNote) -> list[str]:
    """Return torch elastic's command of this node."""
    launch = spec.placement.launch
    most = launch.num_nodes or 1
    least = launch.min_nodes or most
    options = {
        "is_host": str(own.number == 0).lower(),
        "join_timeout": int(launch.start_timeout_s),
        # How long nodes beyond the least are waited for.
        "last_call_timeout": _LAST_CALL_S,
    }
    return elastic_command(
        run,
        logs=own.logs,
        num_nodes=f"{least}:{most}" if least < most else str(most),
        ranks_per_node=spec.placement.layout.world_size // most,
        max_restarts=spec.placement.max_restarts,
        meeting={
            "rdzv-backend": "c10d",
            "rdzv-endpoint": own.meet,
            # Of this meeting alone: a node that is late from an earlier one meets nobody.
            "rdzv-id": note.meeting,
            "rdzv-conf": ",".join(f"{name}={value}" for name, value in options.items()),
            "local-addr": note.address,
        },
    )


def _read_spec(folder: RunFolder, *, name: str) -> RunSpec:
    if not (folder.path / "run_spec.json").is_file():
        raise RunError(
            f"{folder.path.absolute()} is no run's folder on node {name}",
            allowed="Every node sees the run's folder under the same path",
            cure="Put folders.runs on a disk that all nodes share, and start in the same folder",
        )
    return folder.read_spec()


def _run_ranks(
    folder: RunFolder, *, spec: RunSpec, own: Own, note: NodeNote, stops: process.StopSignals
) -> int:
    child = process.start(
        command(spec, run=folder.path, own=own, note=note),
        env={
            **os.environ,
            "PYTHONPATH": python_path(),
            **_interface(note.address),
            **rank_environment(spec, logs=own.logs),
            NODE_VARIABLE: own.name,
        },
        log=own.logs / f"launcher-{own.name}.log",
    )
    try:
        return _wait(child, folder=folder, name=own.name, stops=stops)
    finally:
        process.end(child, grace_s=_KILL_GRACE_S)


def _read_end(folder: RunFolder, *, code: int) -> int:
    """Say by the run's folder how it ended: its ranks leave with 0 when they stop, too."""
    if folder.read_run() is not None:
        return 0
    return STOPPED if folder.read_status().get("state") == "stopped" else code or 1


def _others_go_on(folder: RunFolder, *, spec: RunSpec) -> bool:
    """Whether ranks stopped because a node went, and others may go on without it."""
    by_signal = folder.read_status().get("by") == "signal"
    return by_signal and spec.placement.launch.min_nodes is not None


def _interface(address: str) -> dict[str, str]:
    """Have gloo take the interface that the other nodes reach; it would go by the host's name."""
    if address.startswith("127.") or address == "::1":
        return loopback()
    names = [
        name
        for name, addresses in psutil.net_if_addrs().items()
        if any(each.address == address for each in addresses)
    ]
    if not names or "GLOO_SOCKET_IFNAME" in os.environ:
        return {}
    return {"GLOO_SOCKET_IFNAME": names[0]}


def _wait(child: process.Child, *, folder: RunFolder, name: str, stops: process.StopSignals) -> int:
    """Wait for the ranks; a stop signal lets them save, a second one, or a minute, ends them."""
    deadline: float | None = None
    end = _End(folder)
    next_beat = 0.0
    while (code := child.poll()) is None:
        now = time.monotonic()
        if now >= next_beat:
            next_beat = now + BEAT_EVERY_S
            with suppress(OSError):
                os.utime(folder.node_path(name))
            if end.is_old(now):
                return 1
        if deadline is None and _asked_to_stop(folder, child=child, stops=stops):
            deadline = now + _STOP_GRACE_S
        if deadline is not None and (stops.count > 1 or now > deadline):
            return -1
        time.sleep(_POLL_S)
    return code


class _End:
    """Tells when ranks have ended and torch elastic still waits, for agents that are gone.

    It waits five minutes. Ranks that it starts again say so themselves before this is old.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._before = folder.read_status()
        self._since: float | None = None

    def is_old(self, now: float) -> bool:
        """Whether this launch's ranks said some time ago that they have ended."""
        status = self._folder.read_status()
        if status == self._before:
            return False
        if status.get("state") == "failed" and "error" in status:
            return True  # starting the ranks again would not help
        if status.get("state") not in ("stopped", "finished"):
            self._since = None
            return False
        self._since = now if self._since is None else self._since
        return now - self._since > _SETTLE_S


def _asked_to_stop(folder: RunFolder, *, child: process.Child, stops: process.StopSignals) -> bool:
    """Pass a signal on to this node's ranks; a request in the folder all ranks see by themselves.

    Ranks that have not met yet see nothing: torch elastic is ended.
    """
    if folder.stop.exists() and folder.read_status().get("state") == "starting":
        process.interrupt(child)
        return True
    if not stops.count:
        return False
    _LOG.info("%s: the ranks save a checkpoint and stop", stops.name)
    process.interrupt(child)
    return True


if __name__ == "__main__":
    sys.exit(main())
