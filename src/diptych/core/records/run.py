"""Records of a run: what names it, where it is placed, what its steps left behind."""

from __future__ import annotations

import math
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from diptych.core.hashing import sha256_json
from diptych.core.records.base import FORMAT_VERSION, Record, Section
from diptych.core.records.contrast import ContrastSpec
from diptych.core.records.data import Buckets
from diptych.core.records.launch import LaunchSpec
from diptych.core.records.layout import Layout
from diptych.core.records.model import ModelSpec
from diptych.core.records.observed import ObserveSpec, Over, Phase
from diptych.core.records.optimizer import OptimizerSpec
from diptych.core.records.provenance import Provenance


class ScheduleSpec(Section):
    """What decides the rows of every global batch; part of a run's identity.

    `mode`: in `bucket` a row is one sample, and `group` rows of one resolution bucket and near
    length stay together; in `pack` a row holds several samples, up to `max_row_tokens` and
    `max_row_patches` (None: no limit), and every row is padded to `max_row_tokens`.

    `over_long`: a sample that no row can hold stops the run, or is left out and counted; it is
    never cut. `balance_steps`: rows of near-equal cost are put into one batch, out of so many
    batches' worth of rows. More balances many ranks better, 1 mixes all kinds of samples in every
    batch. `repeats` says how often an epoch takes each sample of a source (1 where it is not
    named; 0.5 takes another half in each epoch); `weights` instead gives the sources' shares of an
    epoch that is as long as all samples together.
    """

    mode: Literal["bucket", "pack"] = "bucket"
    global_batch: int = Field(default=32, ge=1)
    group: int = Field(default=8, ge=1)
    window_shards: int = Field(default=8, ge=1)
    balance_steps: int = Field(default=16, ge=1)
    max_row_tokens: int = Field(default=1024, ge=8)
    max_row_patches: int | None = Field(default=None, ge=4)
    over_long: Literal["refuse", "leave_out"] = "refuse"
    repeats: dict[str, float] = Field(default_factory=dict)
    weights: dict[str, float] = Field(default_factory=dict)
    token_weight: float = Field(default=0.5, ge=0)
    square_weight: float = Field(default=0.25, ge=0)
    patch_weight: float = Field(default=0.25, ge=0)
    seed: int = 0

    @model_validator(mode="after")
    def _check_mix(self) -> Self:
        if self.repeats and self.weights:
            raise ValueError(
                "both 'repeats' and 'weights' are given: repeats say how often each sample is "
                "taken, weights the sources' shares; keep one of them"
            )
        for setting, values in (("repeats", self.repeats), ("weights", self.weights)):
            for source, value in values.items():
                if not (math.isfinite(value) and value >= 0):
                    raise ValueError(f"'{setting}' has {value} for '{source}'; use a number from 0")
        return self


Keeps = Literal["all", "weights"]
"""What a fork takes over of its parent: everything, or the weights and the counters alone."""


class Parent(Record):
    """The checkpoint that a run was forked from; part of the fork's identity.

    `run_id` is the parent's folder, `step` the checkpoint's, `sha256` that of its checksums, which
    stand for all its files.
    """

    run_id: str
    step: int
    sha256: str
    keeps: Keeps = "all"


class Identity(Record):
    """What a run is. Its hash names the run; nothing of where or how fast it runs is in it.

    `parent` is the checkpoint that a forked run began from.
    """

    manifest_sha256: str
    processor_sha256: str
    model: ModelSpec
    schedule: ScheduleSpec
    buckets: Buckets
    optimizer: OptimizerSpec
    num_steps: int
    seed: int
    ema_decay: float | None = None
    label_smoothing: float = 0.0
    contrast: ContrastSpec | None = None
    parent: Parent | None = None

    @property
    def sha256(self) -> str:
        """The identity's hash; its first twelve digits are the run's id."""
        # A run without a parent, or towers' weights, keeps the name that it had before there were.
        left_out: dict[str, Any] = {"parent": True} if self.parent is None else {}
        if self.model.towers is None:
            left_out["model"] = {"towers": True}
        return sha256_json(self.model_dump(mode="json", exclude=left_out))


class Placement(Record):
    """Where and how a run runs; may change between attempts, never changes the name.

    Paths are relative to the project's folder, where the ranks run. `keep_checkpoints` of the
    newest stay, the first at or after each multiple of `keep_every_steps`, and the one whose score
    named `keep_best` is lowest. `parent_checkpoint` is where the parent's checkpoint lies, of a
    forked run. `checkpoint_bytes` is about what a checkpoint takes.
    """

    layout: Layout
    num_workers: int
    threads_per_rank: int
    log_every_steps: int
    checkpoint_every_steps: int
    checkpoint_min_interval_s: float
    keep_checkpoints: int
    checkpoint_saving: Literal["auto", "async", "sync"] = "auto"
    keep_every_steps: int | None = None
    keep_best: str | None = None
    weights_every_steps: int | None = None
    heldout_every_steps: int
    heldout_max_samples: int
    max_restarts: int
    shards: str
    manifest: str
    sample_costs: str
    processor: str
    image_cache: str | None = None
    image_cache_bytes: int = 0
    vision_features: str | None = None
    name_nonfinite: bool = False
    parent_checkpoint: str | None = None
    checkpoint_bytes: int | None = None
    launch: LaunchSpec = LaunchSpec()
    observe: ObserveSpec = ObserveSpec()


class RunSpec(Record):
    """`run_spec`: one JSON file with three parts, of which the identity alone makes the name.

    `vocabulary_sha256` follows from the processor; it says whether another one has the same tokens.
    """

    version: int = FORMAT_VERSION
    identity: Identity
    placement: Placement
    provenance: Provenance
    vocabulary_sha256: str | None = None

    @property
    def run_id(self) -> str:
        """Twelve digits of the identity's hash."""
        return self.identity.sha256[:12]


class LoaderState(Record):
    """Where the loader is: the next step, and what was masked or skipped so far.

    `step` counts over all epochs; `first_step` is the step that the epoch began with.
    """

    epoch: int = 0
    step: int = 0
    first_step: int = 0
    schedule_sha256: str = ""
    masked_keys: tuple[str, ...] = ()
    skipped_steps: tuple[int, ...] = ()


class StepRecord(Record):
    """`step_record`: the numbers of one optimizer step over all ranks; not measured is None.

    `step` counts from 1. `loss` and `grad_norm` are None where they were not finite; such a step is
    `skipped`: no weight has changed. `num_masked` and `num_skipped` count from the run's start,
    `num_recompiles` from the attempt's, on the rank that has most. `loss_scale` is the one that the
    step ran with (fp16). `num_failed_saves` counts this attempt's checkpoints that could not be
    written. `nonfinite` says what was first not finite, where that was asked for.
    `lr_by_tower` has the towers with rates of their own. `loss` is that of language alone, a mean
    over label tokens; `vision_loss` is the contrastive one, a mean over samples that have an image
    and labels, None where it is not made.

    `step_s` is the time since the step before, so that steps add up to the run's time; held-out
    losses, checkpoints and what a skipped step takes beside are left out. In `data_s` of it the
    rank waited for a batch: the one of the next step, which is fetched ahead (in an attempt's first
    step its own, too). Both are the slowest rank's. `tokens_per_s` are the step's text and image
    tokens over `step_s`.

    `time_s` is when the step ended, in seconds since 1970, by the first rank's clock. `phases_s`
    says where the ranks' time went since the step before ended, see `Phase`: what stood between the
    two steps (a checkpoint, held-out losses, a profile's trace) is in it, and not in `step_s`.
    `profiled` steps are those with torch's profiler on, and the one after its trace was written:
    what they took is not what the run's own steps take.
    `grad_norm_by_tower` is before clipping. `model_flops` are what the step's own tokens and
    patches need, forward and backward; `hardware_flops` count padding and recomputing, too; `mfu`
    and `hfu` are those over what the devices could have done in `step_s`. `memory_bytes` has
    `allocated`, `reserved` and `peak` of the device and `host` of the process; `num_alloc_retries`
    is the worst rank's, since it began.
    """

    step: int
    epoch: int
    loss: float | None
    vision_loss: float | None = None
    lr: float
    lr_by_tower: dict[str, float] = Field(default_factory=dict)
    grad_norm: float | None
    num_rows: int
    num_samples: int
    num_label_tokens: int
    num_text_tokens: int
    num_image_tokens: int
    num_patches: int
    padding_fraction: float
    step_s: float
    data_s: float
    tokens_per_s: float
    idle_fraction: float | None = None
    loss_by_source: dict[str, float] = Field(default_factory=dict)
    num_samples_by_source: dict[str, int] = Field(default_factory=dict)
    num_label_tokens_by_source: dict[str, int] = Field(default_factory=dict)
    heldout_loss: float | None = None
    heldout_loss_by_source: dict[str, float] = Field(default_factory=dict)
    skipped: bool = False
    loss_scale: float | None = None
    num_masked: int = 0
    num_skipped: int = 0
    num_failed_saves: int = 0
    num_recompiles: int | None = None
    nonfinite: str | None = None
    attempt: int = 0
    time_s: float | None = None
    phases_s: dict[Phase, Over] = Field(default_factory=dict)
    profiled: bool = False
    grad_norm_by_tower: dict[str, float] = Field(default_factory=dict)
    model_flops: float | None = None
    hardware_flops: float | None = None
    mfu: float | None = None
    hfu: float | None = None
    memory_bytes: dict[str, Over] = Field(default_factory=dict)
    num_alloc_retries: int | None = None


class Run(Record):
    """`run`: what launch leaves behind; `folder` is relative to the project's folder."""

    run_id: str
    identity_sha256: str
    folder: str
    checkpoint: str
    num_steps: int
    final_loss: float | None
    final_heldout_loss: float | None
    train_s: float
    num_attempts: int
    world_size: int
    num_masked: int
    num_skipped: int
    source_sha256: str
