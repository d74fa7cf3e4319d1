"""Compose the run spec: what the run is, where it runs, which code runs it.

In: the plan, the data's and the processor's identities, the parameters. Out: a `RunSpec`. Torch is
imported only where the model's sizes are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from diptych.core import provenance
from diptych.core.errors import ConfigError
from diptych.core.records import (
    Buckets,
    ContrastSpec,
    Identity,
    Keeps,
    LaunchSpec,
    Layout,
    Manifest,
    ModelSpec,
    ObserveSpec,
    OptimizerSpec,
    Placement,
    Plan,
    ProcessorInfo,
    RawSamples,
    RunSpec,
    ScheduleSpec,
    Section,
)
from diptych.data.files.places import check_address
from diptych.data.processor import read_processor_info, vocabulary_sha256
from diptych.model.inspect import complete_sizes
from diptych.plan.speed import peak_flops_per_s
from diptych.shape.families import family
from diptych.train.forks import check_name

_WITH_FEATURES = ("qwen3_vl",)
"""Families whose vision tower can be left out, see `model/features.py`."""


class TrainParams(Section):
    """`train` in the parameters. The first nine are the run's identity, the rest may change.

    `ema_decay`: of the weights' exponential moving average, which a release may be made of; None
    keeps none. `label_smoothing`: this much of every target is spread over the whole vocabulary,
    in training only. `contrast`: a contrastive loss of images beside that of language; None makes
    none. `fork_from`: begin from a checkpoint of another run, `<run>@<step>`; of which `fork_keeps`
    takes all, or the weights and the counters.
    """

    num_steps: int = Field(default=800, ge=1)
    seed: int = 0
    schedule: ScheduleSpec = ScheduleSpec()
    optimizer: OptimizerSpec = OptimizerSpec()
    ema_decay: float | None = Field(default=None, gt=0, lt=1)
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    contrast: ContrastSpec | None = None
    fork_from: str | None = None
    fork_keeps: Keeps = "all"
    log_every_steps: int = Field(default=1, ge=1)
    checkpoint_every_steps: int = Field(default=100, ge=1)
    checkpoint_min_interval_s: float = Field(default=30.0, ge=0)
    checkpoint_saving: Literal["auto", "async", "sync"] = "auto"
    keep_checkpoints: int = Field(default=2, ge=1)
    keep_every_steps: int | None = Field(default=None, ge=1)
    keep_best: str | None = None
    weights_every_steps: int | None = Field(default=None, ge=1)
    heldout_every_steps: int = Field(default=100, ge=0)
    heldout_max_samples: int = Field(default=128, ge=0)
    num_workers: int | Literal["auto"] = "auto"
    shards_url: str | None = None
    image_cache: str | None = None
    image_cache_bytes: int = Field(default=10 * 1024**3, ge=0)
    vision_features: str | None = None
    name_nonfinite: bool = False
    max_restarts: int = Field(default=3, ge=0)
    launch: LaunchSpec = LaunchSpec()
    observe: ObserveSpec = ObserveSpec()

    @field_validator("fork_from", mode="before")
    @classmethod
    def _check_fork(cls, value: Any) -> Any:
        return check_name(value)

    @field_validator("shards_url")
    @classmethod
    def _check_url(cls, value: str | None) -> str | None:
        if value is not None:
            check_address(value)
        return value

    @model_validator(mode="after")
    def _check_schedule(self) -> Self:
        warmup_steps, decay_steps = self.optimizer.warmup_steps, self.optimizer.decay_steps or 0
        if warmup_steps > self.num_steps:
            raise ValueError(
                f"optimizer.warmup_steps is {warmup_steps} and num_steps is {self.num_steps}; the "
                "warm-up cannot be longer than the run: lower optimizer.warmup_steps"
            )
        if warmup_steps + decay_steps > self.num_steps:
            raise ValueError(
                f"optimizer.decay_steps is {decay_steps}, warmup_steps is {warmup_steps} and "
                f"num_steps is {self.num_steps}; warm-up and fall cannot be longer than the run: "
                "lower optimizer.decay_steps"
            )
        return self

    @model_validator(mode="after")
    def _check_negatives(self) -> Self:
        if self.contrast is not None and self.schedule.mode != "pack":
            raise ValueError(
                f"contrast is set and schedule.mode is {self.schedule.mode}, in which a row is one "
                "sample; a sample's negatives are its neighbours in a packed row: set "
                "schedule.mode to pack (and the rows to fit it), or contrast to null"
            )
        return self


class Folders(Section):
    """Where the big things lie, relative to the project's folder."""

    sample_index: str
    shards: str
    manifest: str
    processor: str
    sample_costs: str
    runs: str
    release: str
    stages: str


def compose(
    plan: Plan,
    raw_samples: RawSamples,
    manifest: Manifest,
    processor: Path,
    buckets: Buckets,
    model: ModelSpec,
    train: TrainParams,
    folders: Folders,
) -> RunSpec:
    """Compose the run spec of a run that begins at its beginning; `fork` gives it a parent.

    Raises:
        ConfigError: no training sample, a model of another family than the processor, or whose
            sizes contradict it, or settings that do not go together.
    """
    if manifest.num_samples("train") == 0:
        raise ConfigError(
            "The manifest has no training sample",
            cure="Set a source's split to train, or its heldout_fraction below 1",
        )
    info = read_processor_info(processor)
    check_freeze(model, train=train)
    _check_family(model, info=info)
    layout = plan.best
    _check_loss(layout, train=train)
    _check_best(train, sources=manifest.sources)
    identity = Identity(
        manifest_sha256=manifest.sha256,
        processor_sha256=info.sha256,
        model=model,
        schedule=_mix(train.schedule, raw_samples=raw_samples),
        buckets=buckets,
        optimizer=train.optimizer,
        num_steps=train.num_steps,
        seed=train.seed,
        ema_decay=train.ema_decay,
        label_smoothing=train.label_smoothing,
        contrast=train.contrast,
    )
    placement = Placement(
        layout=layout,
        num_workers=_num_workers(train, plan=plan, layout=layout),
        threads_per_rank=threads_per_rank(plan, layout=layout),
        log_every_steps=train.log_every_steps,
        checkpoint_every_steps=train.checkpoint_every_steps,
        checkpoint_min_interval_s=train.checkpoint_min_interval_s,
        checkpoint_saving=train.checkpoint_saving,
        keep_checkpoints=train.keep_checkpoints,
        keep_every_steps=train.keep_every_steps,
        keep_best=train.keep_best,
        weights_every_steps=train.weights_every_steps,
        heldout_every_steps=train.heldout_every_steps,
        heldout_max_samples=train.heldout_max_samples,
        max_restarts=train.max_restarts,
        shards=train.shards_url or folders.shards,
        manifest=folders.manifest,
        sample_costs=folders.sample_costs,
        processor=folders.processor,
        image_cache=train.image_cache,
        image_cache_bytes=train.image_cache_bytes if train.image_cache else 0,
        vision_features=train.vision_features,
        name_nonfinite=train.name_nonfinite,
        observe=_with_peak(train.observe, plan=plan, layout=layout),
        checkpoint_bytes=plan.checkpoint_bytes,
        launch=_spread_over_nodes(train.launch, plan=plan, layout=layout),
    )
    return RunSpec(
        identity=identity,
        placement=placement,
        provenance=provenance.read(),
        vocabulary_sha256=vocabulary_sha256(processor),
    )


def check_freeze(model: ModelSpec, *, train: TrainParams) -> None:
    """Refuse what trains nothing, or too little for what is asked of it, or too much.

    Features need a vision tower that does not train; a contrastive loss, one that does, or a
    connector.

    Raises:
        ConfigError: too many towers are frozen, or too few.
    """
    adapted = () if model.lora is None else model.lora.towers
    if {"vision", "connector", "language"} <= set(model.freeze) and not adapted:
        raise ConfigError(
            f"plan.model.freeze names {', '.join(model.freeze)}: hardly a weight would train",
            allowed="At least one of vision, connector and language trains",
            cure="Take one of them out of plan.model.freeze",
        )
    _check_pulled(model, train=train)
    if train.vision_features is not None and "vision" in adapted:
        raise ConfigError(
            "train.vision_features keeps what the vision tower computes, but plan.model.lora puts "
            "adapters that learn into it",
            allowed="Features can stand in for images only while what the tower computes stays",
            cure="Take vision out of plan.model.lora.towers, or set train.vision_features to null",
        )
    if train.vision_features is not None and "vision" not in model.freeze:
        raise ConfigError(
            "train.vision_features keeps what the vision tower computes, but that tower trains",
            allowed="Features can stand in for images only while the tower's weights stay",
            cure="Set plan.model.freeze to [vision], or train.vision_features to null",
        )
    if train.vision_features is not None and model.family not in _WITH_FEATURES:
        raise ConfigError(
            f"train.vision_features is set for a model of the family '{model.family}'",
            allowed=f"Built for {', '.join(_WITH_FEATURES)}",
            cure="Set train.vision_features: null",
        )


def _check_pulled(model: ModelSpec, *, train: TrainParams) -> None:
    """Refuse a contrastive loss that no weight learns from; an adapter learns in a frozen tower."""
    adapted = () if model.lora is None else model.lora.towers
    frozen = [
        tower for tower in ("vision", "connector") if tower in model.freeze and tower not in adapted
    ]
    if train.contrast is not None and len(frozen) == 2:
        raise ConfigError(
            "train.contrast pulls images to their words, and plan.model.freeze names vision and "
            "connector",
            allowed="The vision tower, or the connector, or adapters in them train",
            cure="Take one of them out of plan.model.freeze, or set train.contrast to null",
        )


def _check_best(train: TrainParams, *, sources: Sequence[str]) -> None:
    """Refuse a score that no checkpoint would have."""
    heldout = ["heldout_loss", *(f"heldout_loss/{source}" for source in sources)]
    if train.keep_best is None:
        return
    if train.keep_best not in ("loss", *heldout):
        raise ConfigError(
            f"train.keep_best is '{train.keep_best}', which is no score of a checkpoint",
            allowed=f"loss, {', '.join(heldout)}",
            cure="Name one of these, or set train.keep_best: null",
        )
    if train.keep_best != "loss" and not train.heldout_max_samples:
        raise ConfigError(
            f"train.keep_best is '{train.keep_best}', and train.heldout_max_samples is 0",
            cure="Set train.heldout_max_samples to some samples, such as 128",
        )


def _check_family(model: ModelSpec, *, info: ProcessorInfo) -> None:
    """Refuse a model and a processor that do not belong together."""
    known = family(model.family)
    if info.family != known.name:
        raise ConfigError(
            f"The processor is of the family '{info.family}', the model of '{known.name}'",
            allowed="One family for both",
            cure="Set plan.model.family, or prepare.processor.family (mode fit) or .source (load)",
        )
    sizes = complete_sizes(model, num_tokens=info.tokens.num_embeddings)
    known.check(sizes, image=info.image, tokens=info.tokens)


def _check_loss(layout: Layout, *, train: TrainParams) -> None:
    if train.label_smoothing and layout.memory.loss == "fused":
        raise ConfigError(
            f"train.label_smoothing is {train.label_smoothing:g}, and plan.layout.memory.loss is "
            "fused",
            allowed="The losses whole and chunked smooth labels",
            cure="Set plan.layout.memory.loss to chunked, or train.label_smoothing to 0",
        )


def _with_peak(observe: ObserveSpec, *, plan: Plan, layout: Layout) -> ObserveSpec:
    """Fill in the peak of one device, where it is known and nobody has said another."""
    if observe.flops_per_s is not None:
        return observe
    return observe.model_copy(
        update={"flops_per_s": peak_flops_per_s(plan.cluster.device, layout=layout)}
    )


def _spread_over_nodes(launch: LaunchSpec, *, plan: Plan, layout: Layout) -> LaunchSpec:
    """Say on how many nodes the ranks are, the same number on each.

    Raises:
        ConfigError: one node where several are planned for, or ranks that nodes cannot share.
    """
    num_nodes = launch.num_nodes or plan.cluster.num_nodes
    if launch.kind == "local" and num_nodes > 1:
        raise ConfigError(
            f"train.launch.kind is local, which is this machine, and the run is for {num_nodes} "
            "nodes",
            allowed="nodes, slurm and ray start ranks on several machines",
            cure="Set train.launch.kind, or num_nodes (train.launch, plan.cluster) to 1",
        )
    if layout.world_size % num_nodes:
        raise ConfigError(
            f"{layout.world_size} ranks cannot be shared evenly by {num_nodes} nodes",
            cure="Plan a multiple of the nodes (plan.layout.num_processes), or set "
            "train.launch.num_nodes to a divisor",
        )
    if launch.min_nodes is not None and launch.min_nodes > num_nodes:
        raise ConfigError(
            f"train.launch.min_nodes is {launch.min_nodes}, and the run is for {num_nodes} nodes",
            cure="Lower min_nodes, or set it to null",
        )
    return launch.model_copy(update={"num_nodes": num_nodes})


def _mix(schedule: ScheduleSpec, *, raw_samples: RawSamples) -> ScheduleSpec:
    """Take the sources' own repeats where the parameters of training name none."""
    if schedule.weights:
        return schedule
    own = {source.name: source.repeat for source in raw_samples.sources if source.repeat != 1.0}
    return schedule.model_copy(update={"repeats": own | schedule.repeats})


def threads_per_rank(plan: Plan, *, layout: Layout) -> int:
    """Share a node's cores over its ranks; at least one, and never more threads than cores."""
    cluster = plan.cluster
    ranks_per_node = -(-layout.world_size // cluster.num_nodes)
    return max(1, cluster.num_cores_per_node // ranks_per_node)


def _num_workers(train: TrainParams, *, plan: Plan, layout: Layout) -> int:
    if train.num_workers != "auto":
        return train.num_workers
    # On a CPU the ranks need every core; on GPUs the host's cores are there to decode.
    if layout.device == "cpu":
        return 0
    return min(8, max(1, threads_per_rank(plan, layout=layout) - 1))
