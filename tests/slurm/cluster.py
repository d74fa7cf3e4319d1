"""A real Slurm of two nodes on this one machine, with daemons, keys and state of its own.

    .venv/bin/python -m tests.slurm.cluster FOLDER     starts one, says how to use it, ends it

Partitions: `main` (the default), `urgent` (preempts `main` with a notice of a minute, requeueing
its jobs) and `short` (one node, at most ten minutes). It needs no rights beyond this user's, and
nothing of the system's own munge or Slurm configuration.
"""

from __future__ import annotations

import getpass
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "scontrol")
NODES = ("n1", "n2")
GRACE_S = 60
_LIMIT_S = 30.0

_CONF = """\
ClusterName=diptych
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ctld_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,batch_sched_delay=0,bf_interval=1
MinJobAge=3600
KillWait=5
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
NodeName={nodes} NodeHostname={host} NodeAddr=127.0.0.1 Port=[{node_ports}] CPUs=4 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=1 GraceTime={grace_s}
PartitionName=urgent Nodes=ALL MaxTime=INFINITE PriorityTier=9 PreemptMode=OFF
PartitionName=short Nodes=n1 MaxTime=10 PriorityTier=1
"""


def missing() -> str:
    """Say which of Slurm's programs this machine lacks; empty where it has them all."""
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
    return ", ".join(name for name in PROGRAMS if shutil.which(name, path=path) is None)


class Cluster:
    """The daemons of a small Slurm; `env` is what its clients need."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.conf = folder / "slurm.conf"
        sbin = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
        self.env = {**os.environ, "SLURM_CONF": str(self.conf), "PATH": sbin}
        self._daemons: dict[str, int] = {}

    def start(self) -> None:
        self.folder.chmod(0o755)
        for name in ("state", "munge", *(f"spool-{node}" for node in NODES)):
            (self.folder / name).mkdir(mode=0o755)
        (self.folder / "state").chmod(0o700)
        self._write_conf()
        self._start_munge()
        self._daemon("slurmctld", "-f", str(self.conf), pid="slurmctld.pid")
        self._wait(lambda: "is UP" in self.ask("scontrol", "ping"), "the controller")
        for node in NODES:
            self._start_node(node)
        self._wait(lambda: self.node_states() == {"idle"}, "two idle nodes")

    def stop(self) -> None:
        """End what was started, the controller's jobs first."""
        if "slurmctld" in self._daemons:
            with suppress(TimeoutError):
                self.clear()
        for pid in self._daemons.values():
            _signal(pid, signal.SIGTERM)
        with suppress(TimeoutError):
            self._wait(lambda: not any(map(_lives, self._daemons.values())), "the daemons' end")
        for pid in self._daemons.values():
            _signal(pid, signal.SIGKILL)

    def clear(self) -> None:
        """Cancel all jobs, and wait until their processes have ended."""
        for state in ("PENDING", "RUNNING"):
            self.ask("scancel", "--user", getpass.getuser(), "--state", state)
        self._wait(lambda: not self.ask("squeue", "-h", "-o", "%i"), "the jobs' end")

    def ask(self, *command: str) -> str:
        """Run a client command; what it printed, its errors included."""
        done = subprocess.run(
            command, env=self.env, capture_output=True, text=True, timeout=60, check=False
        )
        return (done.stdout + done.stderr).strip()

    def node_states(self) -> set[str]:
        return set(self.ask("sinfo", "-h", "-N", "-p", "main", "-o", "%T").split())

    def kill_node(self, node: str) -> None:
        """Kill a node's daemon and all that runs on it, as if its power failed."""
        pid = self._daemons.pop(node)
        _signal(pid, signal.SIGKILL)

    def start_controller(self) -> None:
        self._daemon("slurmctld", "-f", str(self.conf), pid="slurmctld.pid")

    def stop_controller(self) -> None:
        pid = self._daemons.pop("slurmctld")
        _signal(pid, signal.SIGTERM)
        self._wait(lambda: not _lives(pid), "the controller's end")

    def _start_node(self, node: str) -> None:
        self._daemon(
            "slurmd", "-f", str(self.conf), "-N", node, pid=f"slurmd-{node}.pid", name=node
        )

    def _start_munge(self) -> None:
        munge = self.folder / "munge"
        key = munge / "key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        self._daemon(
            "munged",
            # Its folder lies below /tmp, which all may write to.
            "--force",
            f"--socket={munge}/socket",
            f"--key-file={key}",
            f"--log-file={munge}/log",
            f"--pid-file={munge}/pid",
            f"--seed-file={munge}/seed",
            "--num-threads=2",
            pid="munge/pid",
        )

    def _write_conf(self) -> None:
        ports = _free_ports(3)
        self.conf.write_text(
            _CONF.format(
                folder=self.folder,
                host=socket.gethostname().partition(".")[0],
                user=getpass.getuser(),
                ctld_port=ports[0],
                node_ports=",".join(map(str, ports[1:])),
                nodes=",".join(NODES),
                grace_s=GRACE_S,
            )
        )

    def _daemon(self, *command: str, pid: str, name: str | None = None) -> None:
        # A daemon goes to the background by itself, and keeps what it has for output.
        with (self.folder / "daemons.log").open("ab") as log:
            subprocess.run(command, env=self.env, stdout=log, stderr=log, timeout=60, check=True)
        path = self.folder / pid
        self._wait(lambda: path.is_file() and path.read_text().strip(), f"{command[0]}'s pid")
        self._daemons[name or command[0]] = int(path.read_text())

    def _wait(self, condition, what: str) -> None:
        deadline = time.monotonic() + _LIMIT_S
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited {_LIMIT_S:g} s for {what}; its logs: {self.folder}")
            time.sleep(0.1)


def _free_ports(number: int) -> list[int]:
    """Ports below those that the kernel gives out by itself."""
    found: list[int] = []
    while len(found) < number:
        port = 17000 + secrets.randbelow(2500)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            found += [port] if port not in found else []
    return found


def _signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def main() -> None:
    cluster = Cluster(Path(sys.argv[1]).absolute())
    cluster.folder.mkdir(parents=True)
    # A shell that starts it in the background has it ignore Ctrl-C.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    cluster.start()
    print(f"export SLURM_CONF={cluster.conf}", flush=True)
    try:
        signal.pause()
    except KeyboardInterrupt:
        cluster.stop()


if __name__ == "__main__":
    main()
