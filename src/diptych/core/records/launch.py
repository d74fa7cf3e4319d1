"""Where the ranks of a run are started, and how they talk: settings, and what was started.

The sections are also part of the parameters (`train.launch`): one class, one set of defaults. No
field of them holds a secret: all of it stands in the run's folder.
"""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import Field, field_validator

from diptych.core.records.base import Record, Section
from diptych.core.records.provenance import Provenance

LaunchKind = Literal["local", "nodes", "slurm", "ray"]

_VARIABLE = re.compile(r"(NCCL|GLOO|TORCH|UCX|FI|CUDA|OMPI|RDMAV)_[A-Z0-9_]+")


class NetworkSpec(Section):
    """How ranks talk. None and `auto` leave a choice to NCCL, gloo and torch.

    `interface`: the network interface by name, or NCCL's list of prefixes. `infiniband_devices`:
    NCCL's list of adapters. `timeout_s`: how long a collective may take. `debug`: how much NCCL
    says in the ranks' logs. `flight_recorder_entries`: of so many collectives a rank keeps what it
    did last, and writes that beside its log where one hangs; 0 keeps none. `variables`: further
    environment variables of NCCL, gloo, torch, UCX and libfabric.
    """

    interface: str | None = None
    infiniband: Literal["auto", "on", "off"] = "auto"
    infiniband_devices: str | None = None
    algorithm: Literal["auto", "ring", "tree", "collnet_direct", "collnet_chain", "nvls"] = "auto"
    protocol: Literal["auto", "ll", "ll128", "simple"] = "auto"
    peer_to_peer: Literal["auto", "off"] = "auto"
    timeout_s: float = Field(default=600.0, ge=1)
    debug: Literal["off", "version", "warn", "info", "trace"] = "warn"
    flight_recorder_entries: int = Field(default=2000, ge=0)
    variables: dict[str, str] = Field(default_factory=dict)

    @field_validator("variables")
    @classmethod
    def _check_variables(cls, variables: dict[str, str]) -> dict[str, str]:
        for name in variables:
            if not _VARIABLE.fullmatch(name):
                raise ValueError(
                    f"variables has '{name}'; these are named NCCL_, GLOO_, TORCH_, UCX_, FI_, "
                    "CUDA_, OMPI_ or RDMAV_ and are written down: other variables, and secrets, "
                    "belong into the environment itself"
                )
        return variables


class NodesSpec(Section):
    """`nodes`: torch elastic on machines that a person can reach.

    `hosts`: their names, the first of which is the meeting point; with `start: ssh` the driver
    starts each over ssh, with `print` it prints the one command that each of them needs. `port`:
    of the meeting point. `address`: of the first host, where its name does not lead there.
    `python` and `folder`: the interpreter and the project's folder on the hosts, where they are not
    the driver's.
    """

    hosts: tuple[str, ...] = ()
    start: Literal["print", "ssh"] = "print"
    ssh: str = "ssh -o BatchMode=yes"
    address: str | None = None
    port: int = Field(default=29400, ge=1024, le=65535)
    python: str | None = None
    folder: str | None = None


class SlurmSpec(Section):
    """`slurm`: a batch script in the run's folder, submitted and followed.

    `time`: Slurm's time limit, such as `04:00:00`. `warn_s`: so long before the limit, or before a
    preemption that gives notice, ranks are told to save; with `requeue` the job is then queued
    again and goes on. `cancel_on_interrupt`: Ctrl-C cancels the job (after a save) instead of
    leaving it alone. `modules`: loaded by the script. `container`: what starts the ranks in a
    container, such as `apptainer exec --nv image.sif`. `setup`: further lines of the script, run on
    the first node. `options`: further options of sbatch by name, such as `{qos: high}`.
    """

    account: str | None = None
    partition: str | None = None
    constraint: str | None = None
    time: str | None = None
    gpus_per_node: int | None = Field(default=None, ge=0)
    cpus_per_node: int | None = Field(default=None, ge=1)
    memory: str | None = None
    port: int | None = Field(default=None, ge=1024, le=65535)
    warn_s: int = Field(default=120, ge=0, le=65535)
    requeue: bool = True
    cancel_on_interrupt: bool = False
    modules: tuple[str, ...] = ()
    container: str | None = None
    setup: tuple[str, ...] = ()
    python: str | None = None
    options: dict[str, str | int | bool] = Field(default_factory=dict)


class RaySpec(Section):
    """`ray`: Ray Train's torch trainer on a cluster.

    `address`: of a cluster that this machine is a node of, `auto` or host:port; None starts one on
    this machine that ends with the run. `cpus_per_rank` and `gpus_per_rank`: what Ray sets aside
    for each; None takes the rank's threads, and one GPU where the layout runs on GPUs.
    `placement`: Ray's strategy. `resources`: of others of Ray's resources, so much a rank.
    `runtime_env`: handed to Ray.
    """

    address: str | None = None
    cpus_per_rank: float | None = Field(default=None, gt=0)
    gpus_per_rank: float | None = Field(default=None, ge=0)
    placement: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
    resources: dict[str, float] = Field(default_factory=dict)
    runtime_env: dict[str, Any] = Field(default_factory=dict)


class LaunchSpec(Section):
    """`train.launch`: on which machines the ranks are started, and by what.

    `num_nodes`: as many as `plan.cluster.num_nodes` where it is None. `min_nodes`: where nodes are
    lost, the run goes on with no fewer; None never runs on fewer than `num_nodes`.
    `start_timeout_s`: how long nodes may take to meet.
    """

    kind: LaunchKind = "local"
    num_nodes: int | None = Field(default=None, ge=1)
    min_nodes: int | None = Field(default=None, ge=1)
    start_timeout_s: float = Field(default=600.0, ge=1)
    network: NetworkSpec = NetworkSpec()
    nodes: NodesSpec = NodesSpec()
    slurm: SlurmSpec = SlurmSpec()
    ray: RaySpec = RaySpec()


class Launched(Record):
    """What a driver started: by what, under which id, from where; `launch.json` in a run's folder.

    `logs` is the folder of the ranks' logs, within the run's. `job_id` is the scheduler's. Starts
    of its ranks are attempts from number `first_attempt` on.
    """

    kind: LaunchKind
    job_id: str | None = None
    host: str
    pid: int
    started_s: float
    logs: str
    first_attempt: int = 0


class NodeNote(Record):
    """What a node says in a run's folder as it joins; `nodes/<name>.json`.

    `launch` names the launch that it joined, `meeting` the rendezvous. `clock_ahead_s`: its clock
    before that of the disk that holds the folder. `exit_code` is None while its ranks go on, and
    `error` says why it did not take part.
    """

    name: str
    number: int
    launch: str
    meeting: str
    address: str
    host: str
    pid: int
    clock_ahead_s: float
    provenance: Provenance
    exit_code: int | None = None
    error: str | None = None
