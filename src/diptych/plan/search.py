"""Choose how to spread a run: model_shape, cluster and sample_costs in, a plan out.

Every candidate is predicted, none is tried. The plan lists those that can run, best first, then
those that cannot with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PositiveInt

from diptych.core.errors import LayoutError
from diptych.core.layouts import set_of
from diptych.core.records import (
    Cluster,
    CompileOptions,
    DdpOptions,
    Device,
    FsdpOptions,
    Kernel,
    Layout,
    MemoryOptions,
    MixedPrecision,
    ModelShape,
    OptimizerKind,
    OptimizerSpec,
    Plan,
    Prediction,
    ScheduleSpec,
    Section,
    TowerName,
    TowerRates,
    ZeroOptions,
)
from diptych.core.units import format_bytes
from diptych.plan.memory import PROCESS_BYTES, held_bytes, host_bytes, peak_bytes
from diptych.plan.refusals import NOT_BUILT, Setting, refusal, unbuilt_axis
from diptych.plan.speed import step_floor_s
from diptych.plan.states import States
from diptych.plan.workload import Workload, read_workload


class LayoutParams(Section):
    """`plan.layout` in the parameters; `auto` lets the planner choose."""

    engine: Literal["auto", "ddp", "fsdp2", "zero"] = "auto"
    """`auto` tries torch's own, ddp and fsdp2. zero needs DeepSpeed on every node, so it is planned
    where it is asked for."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    num_nodes: PositiveInt = 1
    num_processes: Literal["auto"] | PositiveInt = "auto"
    """Ranks of all nodes together."""
    max_cpu_processes: PositiveInt = 4
    """The most that `auto` starts on a CPU."""
    micro_batch: Literal["auto"] | PositiveInt = "auto"
    memory_fraction: float = Field(default=0.9, gt=0, le=1)
    """Of a device's memory that a plan may fill; the rest is for fragmentation and others."""
    replicas: Literal["auto"] | PositiveInt = "auto"
    """Copies of the sharded states (fsdp2): 1 shards over all ranks; auto: one on every node."""
    grad_sync: Literal["auto", "last", "every"] = "auto"
    batch_norm: Literal["refuse", "frozen", "sync"] = "refuse"
    attention: Literal["auto"] | Kernel = "auto"
    ddp: DdpOptions = DdpOptions()
    fsdp: FsdpOptions = FsdpOptions()
    zero: ZeroOptions = ZeroOptions()
    mixed_precision: MixedPrecision = MixedPrecision()
    memory: MemoryOptions = MemoryOptions()
    compile: CompileOptions = CompileOptions()

    @property
    def options(self) -> dict[str, Any]:
        """What every layout of the plan takes over as it is."""
        names = (
            "batch_norm",
            "attention",
            "ddp",
            "fsdp",
            "zero",
            "mixed_precision",
            "memory",
            "compile",
        )
        return {name: getattr(self, name) for name in names}


ORDER = "the fewest rows on the busiest rank, then the simpler engine, then the least time"
"""What comes first among layouts that can run, in words."""

_NO_RATES: dict[TowerName, TowerRates] = {}


def search(
    model_shape: ModelShape,
    cluster: Cluster,
    sample_costs: Path,
    schedule: ScheduleSpec,
    layout: LayoutParams,
    optimizer: OptimizerKind = "adamw",
    towers: dict[TowerName, TowerRates] = _NO_RATES,
    ema_decay: float | None = None,
) -> Plan:
    """Rank the layouts that this cluster can run.

    Of the optimizer it takes what decides on bytes; another learning rate makes no other plan.

    Args:
        model_shape: the model, and what of it trains.
        cluster: the machine.
        sample_costs: the folder of every sample's lengths.
        schedule: what is in a global batch.
        layout: what is asked for.
        optimizer: its kind.
        towers: the towers' own rates, which make groups of weights.
        ema_decay: of the weights' mean, if one is kept.

    Raises:
        ConfigError: a tower has rates of its own, and nothing of it trains.
        LayoutError: what is asked for is not there, or nothing fits.
    """
    used = _used_cluster(cluster, params=layout)
    workload = read_workload(Path(sample_costs))
    states = States(OptimizerSpec(kind=optimizer, towers=towers), has_mean=ema_decay is not None)
    predictor = _Predictor(
        model_shape,
        cluster=used,
        workload=workload,
        schedule=schedule,
        params=layout,
        states=states,
    )
    runnable: list[Prediction] = []
    refused: list[Prediction] = []
    for candidate in _candidates(used, schedule=schedule, params=layout):
        prediction = predictor.predict(candidate)
        (refused if prediction.refused else runnable).append(prediction)
    if not runnable:
        built = [each for each in refused if not unbuilt_axis(each.layout)]
        assert built, "every engine has a candidate that is built"
        nearest = min(built, key=lambda each: each.peak_bytes)
        raise LayoutError(
            f"No layout fits; the nearest is {_describe(nearest.layout)}: {nearest.refused}",
            cure="Use more or larger devices, a smaller model or group, or shorter rows",
        )
    runnable.sort(key=lambda each: _rank(each, schedule=schedule))
    refused.sort(key=lambda each: each.peak_bytes)
    return Plan(
        cluster=used,
        global_batch=schedule.global_batch,
        predictions=(*runnable, *refused),
        checkpoint_bytes=states.checkpoint_bytes(model_shape),
        asked=set_of(layout, path="plan.layout"),
    )


def _used_cluster(cluster: Cluster, *, params: LayoutParams) -> Cluster:
    """Cut the cluster to the nodes and the kind of device that are asked for."""
    if params.num_nodes > cluster.num_nodes:
        raise LayoutError(
            f"plan.layout.num_nodes is {params.num_nodes}",
            allowed=f"The cluster has {cluster.num_nodes}",
            cure="Lower it, or set plan.cluster.num_nodes",
        )
    used = cluster.model_copy(update={"num_nodes": params.num_nodes})
    if params.device == "cuda" and cluster.device.kind != "cuda":
        raise LayoutError(
            "plan.layout.device is 'cuda', and the cluster has no GPU",
            cure="Set plan.layout.device: auto, or describe the GPUs in plan.cluster",
        )
    if params.device == "cpu" and cluster.device.kind == "cuda":
        host = Device(
            kind="cpu", name="CPU", memory_bytes=cluster.host_memory_bytes, flops_per_s={}
        )
        used = used.model_copy(
            update={"device": host, "num_devices_per_node": 1, "link_bytes_per_s": None}
        )
    return used


def _candidates(
    cluster: Cluster, *, schedule: ScheduleSpec, params: LayoutParams
) -> Iterator[Layout]:
    precision = params.precision
    if precision == "auto":
        fast = cluster.device.kind == "cuda" and (
            not cluster.device.flops_per_s or "bf16" in cluster.device.flops_per_s
        )
        precision = "bf16" if fast else "fp32"
    for world in _world_sizes(cluster, schedule=schedule, params=params):
        for axes in _axes(world, cluster=cluster, params=params):
            for micro_batch in _micro_batches(world, schedule=schedule, params=params):
                candidate = Layout(
                    **axes,
                    **params.options,
                    micro_batch=micro_batch,
                    precision=precision,
                    device=cluster.device.kind,
                )
                if _is_wanted(candidate, schedule=schedule, params=params):
                    yield candidate


def _is_wanted(candidate: Layout, *, schedule: ScheduleSpec, params: LayoutParams) -> bool:
    """Whether the gradients' syncs are those asked for; with one micro-batch, each is the last."""
    if params.grad_sync != "auto":
        return candidate.grad_sync == params.grad_sync
    return candidate.grad_sync == "last" or _num_micro_batches(candidate, schedule=schedule) > 1


def _world_sizes(cluster: Cluster, *, schedule: ScheduleSpec, params: LayoutParams) -> list[int]:
    on_cpu = cluster.device.kind == "cpu"
    if params.num_processes != "auto":
        if not on_cpu and params.num_processes > cluster.num_devices:
            raise LayoutError(
                f"plan.layout.num_processes is {params.num_processes}",
                allowed=f"One rank a GPU, and {params.num_nodes} node(s) have "
                f"{cluster.num_devices}",
                cure="Lower it, or set it to auto",
            )
        if params.num_processes % params.num_nodes:
            raise LayoutError(
                f"plan.layout.num_processes is {params.num_processes}",
                allowed=f"A multiple of num_nodes, {params.num_nodes}",
                cure="Every node starts as many ranks",
            )
        return [params.num_processes]
    if not on_cpu:
        return [cluster.num_devices]
    # More ranks than rows would leave ranks without work in every step.
    most = min(params.max_cpu_processes, cluster.num_cores_per_node, schedule.global_batch)
    return [params.num_nodes * ranks for ranks in range(1, most + 1)]


def _axes(world: int, *, cluster: Cluster, params: LayoutParams) -> Iterator[dict]:
    """Yield engine and axis sizes; axes that are not built yet too, to be refused by name."""
    grad_sync = "last" if params.grad_sync == "auto" else params.grad_sync
    if params.engine in ("auto", "ddp"):
        yield {"engine": "ddp", "dp": world, "grad_sync": grad_sync}
    if params.engine == "fsdp2" or (params.engine == "auto" and world > 1):
        for replicas in _replicas(world, cluster=cluster, params=params):
            for grad_sync in ("last", "every"):
                yield {
                    "engine": "fsdp2",
                    "dp": replicas,
                    "shard": world // replicas,
                    "grad_sync": grad_sync,
                }
    if params.engine == "zero":
        yield {"engine": "zero", "shard": world, "grad_sync": grad_sync}
    if params.engine == "auto" and world > 1:
        for axis in NOT_BUILT:
            yield {"engine": "ddp", axis: world}


def _replicas(world: int, *, cluster: Cluster, params: LayoutParams) -> list[int]:
    """List how many copies of the shards to try."""
    if params.replicas != "auto":
        if world % params.replicas:
            raise LayoutError(
                f"plan.layout.replicas is {params.replicas} and there are {world} ranks",
                allowed="The copies of the sharded states have equally many ranks",
                cure="Set replicas to a divisor of the number of ranks",
            )
        return [params.replicas]
    nodes = cluster.num_nodes
    # Copies of a shard group within each node: weights travel on the fast links only.
    return [nodes, 1] if 1 < nodes < world else [1]


def _micro_batches(world: int, *, schedule: ScheduleSpec, params: LayoutParams) -> list[int]:
    """List the sizes that hold whole groups or divide one, up to a rank's share."""
    if params.micro_batch != "auto":
        return [params.micro_batch]
    group, share = _group(schedule), -(-schedule.global_batch // world)
    sizes = {size for size in range(1, group + 1) if group % size == 0 and size <= share}
    multiple = group
    while multiple <= share:
        sizes.add(multiple)
        multiple *= 2
    if share % group == 0:
        sizes.add(share)
    return sorted(sizes, reverse=True)


class _Predictor:
    """Bytes, seconds and refusals of one candidate after another."""

    def __init__(
        self,
        model_shape: ModelShape,
        *,
        cluster: Cluster,
        workload: Workload,
        schedule: ScheduleSpec,
        params: LayoutParams,
        states: States,
    ) -> None:
        self.model_shape = model_shape
        self.cluster = cluster
        self.workload = workload
        self.schedule = schedule
        self.params = params
        self.states = states

    def predict(self, layout: Layout) -> Prediction:
        """Predict one layout, and say why it cannot run if so."""
        num_micro_batches = _num_micro_batches(layout, schedule=self.schedule)
        rows = num_micro_batches * layout.micro_batch
        given: dict[str, Any] = {"num_micro_batches": num_micro_batches, "states": self.states}
        heaviest = self.workload.heaviest(layout.micro_batch, schedule=self.schedule)
        held = held_bytes(self.model_shape, layout=layout, **given).total
        peak = peak_bytes(self.model_shape, layout=layout, counts=heaviest, **given)
        host = host_bytes(self.model_shape, layout=layout, counts=heaviest, **given)
        return Prediction(
            layout=layout,
            held_bytes=held,
            peak_bytes=peak,
            host_bytes=host,
            step_s=step_floor_s(
                self.model_shape,
                layout=layout,
                cluster=self.cluster,
                counts=self.workload.mean(
                    min(rows, self.schedule.global_batch), schedule=self.schedule
                ),
                **given,
            ),
            refused=self._refusal(layout, num_micro_batches=num_micro_batches)
            or self._no_room(layout, peak=peak)
            or self._no_room_on_host(layout, host=host),
        )

    def _refusal(self, layout: Layout, *, num_micro_batches: int) -> str | None:
        setting = Setting(
            model_shape=self.model_shape,
            cluster=self.cluster,
            num_micro_batches=num_micro_batches,
            group=_group(self.schedule),
            global_batch=self.schedule.global_batch,
            states=self.states,
        )
        return refusal(layout, setting=setting)

    def _no_room(self, layout: Layout, *, peak: int) -> str | None:
        # The ranks of a node without GPUs share its memory.
        ranks = layout.world_size // self.cluster.num_nodes if layout.device == "cpu" else 1
        budget = int(self.params.memory_fraction * self.cluster.device.memory_bytes)
        if ranks * peak > budget:
            each = f"{ranks} ranks x {format_bytes(peak)}" if ranks > 1 else format_bytes(peak)
            return (
                f"needs {each}, {format_bytes(budget)} may be used of "
                f"{format_bytes(self.cluster.device.memory_bytes)}"
            )
        return None

    def _no_room_on_host(self, layout: Layout, *, host: int) -> str | None:
        """Say that what is offloaded does not fit into a node's memory."""
        ranks = layout.world_size // self.cluster.num_nodes
        budget = int(self.params.memory_fraction * self.cluster.host_memory_bytes)
        each = host + PROCESS_BYTES["cpu"]
        if host and ranks * each > budget:
            return (
                f"offloads {ranks} ranks x {format_bytes(each)} to a node's memory, of whose "
                f"{format_bytes(self.cluster.host_memory_bytes)} {format_bytes(budget)} may be "
                "used; offload less, shard over more nodes, or raise plan.cluster.host_memory_bytes"
            )
        return None


def _group(schedule: ScheduleSpec) -> int:
    """Rows that stay together in a micro-batch; packed rows go with any other."""
    return schedule.group if schedule.mode == "bucket" else 1


def _num_micro_batches(layout: Layout, *, schedule: ScheduleSpec) -> int:
    """Count a rank's micro-batches of one step, the same on every rank."""
    units = -(-schedule.global_batch // layout.micro_batch)
    return -(-units // (layout.dp * layout.shard))


def _rank(prediction: Prediction, *, schedule: ScheduleSpec) -> tuple:
    """Order layouts: fewest rows on the busiest rank, then the simpler engine, then the floor."""
    layout = prediction.layout
    num_micro_batches = _num_micro_batches(layout, schedule=schedule)
    return (
        num_micro_batches * layout.micro_batch,
        layout.engine != "ddp",
        layout.grad_sync == "every",
        prediction.step_s or 0.0,
        num_micro_batches,
    )


def _describe(layout: Layout) -> str:
    return (
        f"{layout.engine} on {layout.world_size} rank(s), micro-batch {layout.micro_batch}, "
        f"{layout.precision}"
    )
