"""What is observed of a run beside its steps: settings, samples of devices, findings."""

from __future__ import annotations

from typing import Literal, NamedTuple, Self

from pydantic import Field, model_validator

from diptych.core.records.base import Record, Section


class Over(NamedTuple):
    """One quantity over ranks: its least, mean and most, and the rank that has most."""

    least: float
    mean: float
    most: float
    rank: int


Phase = Literal[
    "data",
    "place",
    "forward",
    "backward",
    "communication",
    "update",
    "checkpoint",
    "heldout",
    "profile",
    "other",
]
"""Where a rank's time goes, without overlap, so that the phases of a step add up to its time and to
what stands between it and the next: waiting for a batch; copying to the device; computing forward
and backward; waiting for other ranks with nothing to compute (exposed communication); clipping and
the optimizer; waiting for a checkpoint; held-out losses; torch's profiler as it begins, goes on
and writes its trace; all else."""

AlertKind = Literal[
    "nan",
    "divergence",
    "stall",
    "throughput",
    "straggler",
    "disk",
    "host_memory",
    "device_memory",
    "communication",
]


class WandbSpec(Section):
    """Weights & Biases. `offline` writes into the run's folder and sends nothing."""

    mode: Literal["offline", "online"] = "offline"
    project: str = "diptych"
    entity: str | None = None
    tags: tuple[str, ...] = ()
    artifacts: bool = False


class AlertsSpec(Section):
    """Which alerts are given, and where to beside the console.

    `webhook` names the environment's variable that holds the address: addresses of webhooks are
    secrets.
    """

    kinds: tuple[AlertKind, ...] = (
        "nan",
        "divergence",
        "stall",
        "throughput",
        "straggler",
        "disk",
        "host_memory",
        "device_memory",
        "communication",
    )
    wandb: bool = False
    webhook: str | None = None


class ProfileSpec(Section):
    """`every_steps`: 0 profiles on demand alone. `num_steps` in a row, after one that warms up."""

    every_steps: int = Field(default=0, ge=0)
    num_steps: int = Field(default=2, ge=1)
    memory: bool = False


class ObserveSpec(Section):
    """What is observed of a run, and where it is sent. The step log is always written.

    `sample_every_s`: how often each node's devices and host are asked, 0 never. `flops_per_s`: the
    peak of one device, for MFU and HFU; None takes what is known of the device.
    """

    sample_every_s: float = Field(default=2.0, ge=0)
    flops_per_s: float | None = Field(default=None, gt=0)
    sinks: tuple[Literal["wandb", "tensorboard"], ...] = ()
    wandb: WandbSpec = WandbSpec()
    alerts: AlertsSpec = AlertsSpec()
    profile: ProfileSpec = ProfileSpec()

    @model_validator(mode="after")
    def _check_alerts(self) -> Self:
        if self.alerts.wandb and "wandb" not in self.sinks:
            raise ValueError(
                "alerts.wandb is set and nothing goes to wandb; put wandb into sinks, or set "
                "alerts.wandb to false"
            )
        return self


class DeviceSample(Record):
    """One device at one moment; what cannot be asked is None.

    `busy_fraction` is NVML's utilisation: the share of time in which any kernel ran.
    `num_ecc_errors` are those that could not be corrected, since the driver was loaded.
    """

    index: int
    busy_fraction: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    power_w: float | None = None
    clock_hz: float | None = None
    max_clock_hz: float | None = None
    temperature_c: float | None = None
    throttle_reasons: tuple[str, ...] = ()
    num_ecc_errors: int | None = None
    nvlink_bytes_per_s: float | None = None
    pcie_bytes_per_s: float | None = None


class NodeSample(Record):
    """One node at one moment: its devices and its host; a line of `samples/<node>.jsonl`.

    `cpu_fraction` is of all cores, `ranks_cpu_cores` and `loaders_cpu_cores` how many cores this
    run's ranks and their loader processes keep busy, `ranks_memory_bytes` what both hold. Rates are
    those since the sample before.
    """

    time_s: float
    node: str
    attempt: int
    devices: tuple[DeviceSample, ...] = ()
    num_cores: int | None = None
    cpu_fraction: float | None = None
    ranks_cpu_cores: float | None = None
    loaders_cpu_cores: float | None = None
    num_loaders: int | None = None
    memory_available_bytes: int | None = None
    memory_total_bytes: int | None = None
    ranks_memory_bytes: int | None = None
    disk_free_bytes: int | None = None
    disk_read_bytes_per_s: float | None = None
    disk_write_bytes_per_s: float | None = None
    network_sent_bytes_per_s: float | None = None
    network_received_bytes_per_s: float | None = None


Bound = Literal[
    "data",
    "decode_cpu",
    "vision_imbalance",
    "straggler",
    "padding",
    "communication",
    "small_kernels",
    "host_launch",
    "checkpoint",
    "evaluation",
    "throttling",
    "fragmentation",
    "memory",
    "nan_risk",
    "diverging",
    "learning_rate",
]


class Change(Record):
    """A setting to change; `gain` is the share of the time that it may save, None if unknown."""

    setting: str
    to: str
    why: str
    gain: float | None = None


class Finding(Record):
    """What limits a run, or endangers it.

    `cost` is the share of the run's time that it takes, None where it is no matter of time.
    `confidence` is between 0 and 1. `evidence` are sentences with numbers; `steps` those that show
    it, as (first, last). `changes` are in the order of expected gain.
    """

    bound: Bound
    title: str
    cost: float | None
    confidence: float
    evidence: tuple[str, ...]
    steps: tuple[tuple[int, int], ...] = ()
    changes: tuple[Change, ...] = ()


class Diagnosis(Record):
    """Findings about steps of a run, the gravest first; none says that it is healthy.

    `missing` names what was not measured, and so could not be judged.
    """

    run_id: str
    first_step: int
    last_step: int
    healthy: bool
    verdict: str
    findings: tuple[Finding, ...] = ()
    missing: tuple[str, ...] = ()


class Alert(Record):
    """Something that a person should look at now; a line of `alerts.jsonl`.

    One that is over is written once more, with `over`.
    """

    time_s: float
    step: int
    attempt: int
    kind: AlertKind
    text: str
    over: bool = False


class Operator(Record):
    """What one operator, or one class of them, took in a trace; seconds of all steps."""

    name: str
    seconds: float
    count: int


class TraceSummary(Record):
    """A profile of one rank, in seconds of `num_steps` steps.

    `on_device`: whether times are a device's; else they are the host's. `communication_s` is the
    time in which collectives ran, `exposed_s` that of it in which nothing was computed, `idle_s`
    that in which nothing ran at all. Of a device's kernels `num_small` took less than 10
    microseconds, and `small_s` is their sum; None on a host.
    """

    path: str
    rank: int
    num_steps: int
    on_device: bool
    span_s: float
    busy_s: float
    communication_s: float
    exposed_s: float
    idle_s: float
    num_small: int | None = None
    small_s: float | None = None
    phases_s: dict[str, float] = Field(default_factory=dict)
    operators: tuple[Operator, ...] = ()
    classes: tuple[Operator, ...] = ()
