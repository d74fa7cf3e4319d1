"""One node's part of a run on several: meet the other nodes, run this node's ranks, end with them.

`python -m diptych.launch.node <run> <logs> --meet host:port --node 0`, started on every node by a
scheduler, by ssh or by a person, in the project's folder. Exit codes: 0 the run is finished,
75 it was stopped and goes on when it is started again, else what torch elastic says.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import socket
import sys
import time
from pathlib import Path

import psutil

from diptych.core import provenance
from diptych.core.errors import DiptychError, RunError
from diptych.core.files import write_text
from diptych.core.records import RunSpec
from diptych.launch import process
from diptych.launch.elastic import elastic_command
from diptych.launch.network import loopback, python_path, rank_environment
from diptych.monitor.run_folder import RunFolder

STOPPED = 75
"""EX_TEMPFAIL of sysexits.h: try again later."""
_LOG = logging.getLogger("diptych.node")
_POLL_S = 0.2
_DIAL_S = 5.0
_STOP_GRACE_S = 60.0
_KILL_GRACE_S = 5.0


def main(arguments: list[str] | None = None) -> int:
    """Run one node's part; returns its exit code."""
    parser = argparse.ArgumentParser(prog="diptych.launch.node", description=__doc__)
    parser.add_argument("run", type=Path, help="the run's folder")
    parser.add_argument("logs", type=Path, help="the folder of the ranks' logs")
    parser.add_argument("--meet", required=True, help="host:port of the first node")
    parser.add_argument(
        "--node", type=int, required=True, help="its number; 0 is the first"
    )
    parser.add_argument("--name", default=_node_name(), help="of this node, in logs")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # a scheduler's warning: its script heeds it
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


def run_node(run: Path, *, logs: Path, meet: str, number: int, name: str) -> int:
    """Run this node's ranks to their end.

    Args:
        run: the run's folder, the same on every node.
        logs: the folder of the ranks' logs, within it.
        meet: `host:port` of the first node.
        number: of this node; 0 is the first.
        name: of this node.

    Raises:
        RunError: the folder is not there, or the meeting point cannot be reached.
    """
    folder = RunFolder(run)
    spec = _read_spec(folder, name=name)
    host, _, port = meet.rpartition(":")
    if number:
        _dial(host, port=int(port), within_s=spec.placement.launch.start_timeout_s)
    address = own_address(host, port=int(port))
    note_node(folder, name=name, number=number, address=address)
    with process.stop_signals() as stops:
        child = process.start(
            command(spec, run=run, logs=logs, meet=meet, number=number, address=address),
            env={
                **os.environ,
                "PYTHONPATH": python_path(),
                **_interface(address),
                **rank_environment(spec, logs=logs),
                "DIPTYCH_NODE": name,
            },
            log=logs / f"launcher-{name}.log",
        )
        try:
            code = _wait(child, folder=folder, stops=stops)
        finally:
            process.end(child, grace_s=_KILL_GRACE_S)
    if folder.read_run() is not None:
        return 0
    return STOPPED if folder.read_status().get("state") == "stopped" else code or 1


def command(
    spec: RunSpec, *, run: Path, logs: Path, meet: str, number: int, address: str
) -> list[str]:
    """Return torch elastic's command of this node."""
    launch = spec.placement.launch
    most = launch.num_nodes or 1
    least = launch.min_nodes or most
    return elastic_command(
        run,
        logs=logs,
        num_nodes=f"{least}:{most}" if least < most else str(most),
        ranks_per_node=spec.placement.layout.world_size // most,
        max_restarts=spec.placement.max_restarts,
        meeting={
            "rdzv-backend": "c10d",
            "rdzv-endpoint": meet,
            # Of this launch alone: a node that is late from an earlier one meets nobody.
            "rdzv-id": f"{spec.run_id}-{logs.name}",
            "rdzv-conf": f"is_host={str(number == 0).lower()},"
            f"join_timeout={int(launch.start_timeout_s)}",
            "local-addr": address,
        },
    )


def note_node(folder: RunFolder, *, name: str, number: int, address: str) -> None:
    """Say in the run's folder that this node takes part, with what the others compare."""
    path = folder.nodes / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    facts = {
        "name": name,
        "number": number,
        "address": address,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "time_s": round(time.time(), 3),
        "provenance": provenance.read().model_dump(mode="json"),
    }
    write_text(path, text=json.dumps(facts, indent=2) + "\n")


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


def _node_name() -> str:
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def _read_spec(folder: RunFolder, *, name: str) -> RunSpec:
    if not (folder.path / "run_spec.json").is_file():
        raise RunError(
            f"{folder.path.absolute()} is no run's folder on node {name}",
            allowed="Every node sees the run's folder under the same path",
            cure="Put folders.runs on a disk that all nodes share, and start in the same folder",
        )
    return folder.read_spec()


def _dial(host: str, *, port: int, within_s: float) -> None:
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
                    f"{socket.gethostname()} could not reach the meeting point {host}:{port} "
                    f"within {within_s:g} s ({error})",
                    cure="See that the first node runs, that its name leads to it from here, and "
                    "that no firewall closes the port; train.launch.start_timeout_s waits longer",
                ) from None
        time.sleep(1.0)


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


def _wait(child: process.Child, *, folder: RunFolder, stops: process.StopSignals) -> int:
    """Wait for the ranks; a stop signal lets them save, a second one, or a minute, ends them."""
    deadline: float | None = None
    while (code := child.poll()) is None:
        if stops.count and deadline is None:
            _LOG.info("%s: the ranks save a checkpoint and stop", stops.name)
            folder.stop.touch()
            deadline = time.monotonic() + _STOP_GRACE_S
        if deadline is not None and (stops.count > 1 or time.monotonic() > deadline):
            return -1
        time.sleep(_POLL_S)
    return code


if __name__ == "__main__":
    sys.exit(main())
