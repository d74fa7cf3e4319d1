"""The records that cross folders, in the order in which the workflow makes them.

Each is frozen, refuses unknown keys and is kept as JSON. Tables (sample_index, quarantine,
sample_costs) are Parquet; their columns are in `core/tables.py`. A `Section` is a part of the YAML
parameters; it lives beside the function that takes it and has a default for every field.
"""

from __future__ import annotations

import math
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from diptych.core.hashing import sha256_json

FORMAT_VERSION = 1

IMAGE_PLACEHOLDER = "<image>"
"""What stands in a message's text where the sample's next image goes."""


class Record(BaseModel):
    """A frozen value that crosses folders; unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Section(BaseModel):
    """A frozen part of the YAML parameters; unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class RawSource(Record):
    """One annotation file and the folder its image paths are relative to."""

    name: str
    kind: Literal["llava"]
    split: Literal["train", "heldout"] | None
    heldout_fraction: float
    annotations: str
    images: str
    annotations_sha256: str
    listing_sha256: str
    num_image_files: int


class RawSamples(Record):
    """`raw_samples`: what the user has, and enough of a digest to notice a change."""

    sources: tuple[RawSource, ...]


class Message(Record):
    """One turn; `<image>` in the text stands for the next image of the sample."""

    role: Literal["system", "user", "assistant"]
    text: str


class ImageRef(Record):
    """One image of a sample; width and height are those after EXIF rotation."""

    path: str
    width_px: int
    height_px: int
    format: str


class Sample(Record):
    """One conversation with its images; `kinds` has one word per assistant turn (or is empty)."""

    key: str
    source: str
    split: Literal["train", "heldout"]
    messages: tuple[Message, ...]
    images: tuple[ImageRef, ...]
    kinds: tuple[str, ...] = ()


class Buckets(Record):
    """`buckets`: the boundaries of image area and aspect; sample -> bucket is arithmetic.

    Bucket 0 is text only. With areas cut at `areas_px` (ascending) and aspects (width / height) at
    `aspects`, an image sample is in bucket `1 + area_class * (len(aspects) + 1) + aspect_class`.
    """

    areas_px: tuple[int, ...]
    aspects: tuple[float, ...]


class Shard(Record):
    """One tar and its index; paths are relative to the shards folder."""

    path: str
    index_path: str
    split: Literal["train", "heldout"]
    source: str
    num_samples: int
    num_images: int
    num_bytes: int
    sha256: str
    index_sha256: str


class Manifest(Record):
    """`manifest`: the shards and their hashes. Its own hash is the data's identity."""

    version: int = FORMAT_VERSION
    shards: tuple[Shard, ...]
    num_quarantined: int
    quarantined_by_reason: dict[str, int]

    @property
    def sha256(self) -> str:
        """The data's identity: nothing about a tokenizer is in it."""
        return sha256_json(self.model_dump(mode="json"))

    def num_samples(self, split: str) -> int:
        """Count a split's samples."""
        return sum(shard.num_samples for shard in self.shards if shard.split == split)


class ImageSettings(Record):
    """How a processor turns width x height into patches; pixel bounds are areas."""

    patch_px: int
    merge: int
    temporal_patch: int
    min_area_px: int
    max_area_px: int


class TokenIds(Record):
    """The ids that the model's arithmetic needs; `num_tokens` is the tokenizer's size."""

    num_tokens: int
    pad: int
    eos: int
    image: int
    video: int
    vision_start: int
    vision_end: int


class ProcessorInfo(Record):
    """`processor.json` inside the `processor` folder: what others need to know of it."""

    version: int = FORMAT_VERSION
    family: str
    image: ImageSettings
    tokens: TokenIds
    sha256: str


class ModelSpec(Section):
    """Which family, which sizes or weights, and what trains.

    `sizes` is handed to the family's config as two groups, `text` and `vision`, named as
    transformers names them. `weights` is a local folder or a hub id; the two exclude each other.
    """

    family: str = "qwen3_vl"
    sizes: dict[str, dict[str, Any]] = Field(default_factory=dict)
    weights: str | None = None
    tie_word_embeddings: bool = True


class Parameter(Record):
    """One line of the model's shape; `block` names the sharding unit that the parameter is in."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    tower: Literal["vision", "connector", "language", "head"]
    block: str


class ModelShape(Record):
    """`model_shape`: one line per parameter and the widths, free of weights and of torch."""

    family: str
    parameters: tuple[Parameter, ...]
    sizes: dict[str, dict[str, Any]]
    tied_parameters: dict[str, str]

    @property
    def num_parameters(self) -> int:
        """Count the elements of every distinct parameter (a tied one counts once)."""
        return sum(math.prod(parameter.shape) for parameter in self.parameters)


class Device(Record):
    """One kind of device as numbers; what is not known is None."""

    kind: Literal["cpu", "cuda"]
    name: str
    memory_bytes: int
    flops_per_s: dict[str, float]
    memory_bytes_per_s: float | None = None


class Cluster(Record):
    """`cluster`: devices and links as numbers."""

    num_nodes: int
    num_devices_per_node: int
    device: Device
    num_cores_per_node: int
    host_memory_bytes: int
    link_bytes_per_s: float | None = None

    @property
    def num_devices(self) -> int:
        """Count the devices of all nodes."""
        return self.num_nodes * self.num_devices_per_node


class Layout(Record):
    """How a run is spread. World size is the product of the axes; only dp and shard are built."""

    engine: Literal["ddp", "fsdp2"] = "ddp"
    dp: int = 1
    shard: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    micro_batch: int = 1
    precision: Literal["fp32", "bf16"] = "fp32"
    device: Literal["cpu", "cuda"] = "cpu"
    grad_sync: Literal["last", "every"] = "last"

    @property
    def world_size(self) -> int:
        """Count the ranks."""
        return self.dp * self.shard * self.tp * self.pp * self.cp


class Prediction(Record):
    """A layout with its predicted cost; `refused` says why it cannot run."""

    layout: Layout
    held_bytes: int
    peak_bytes: int
    step_s: float | None
    refused: str | None = None


class Plan(Record):
    """`plan`: layouts, best first, then the refused ones with the reason."""

    cluster: Cluster
    global_batch: int
    predictions: tuple[Prediction, ...]

    @property
    def best(self) -> Layout:
        """Return the layout to run."""
        return self.predictions[0].layout


class ScheduleSpec(Section):
    """What decides the rows of every global batch; part of a run's identity.

    `balance_steps`: groups of near-equal cost are put into one batch, out of so many batches' worth
    of groups. More balances many ranks better, 1 mixes all kinds of samples in every batch.
    """

    mode: Literal["bucket"] = "bucket"
    global_batch: int = Field(default=32, ge=1)
    group: int = Field(default=8, ge=1)
    window_shards: int = Field(default=8, ge=1)
    balance_steps: int = Field(default=16, ge=1)
    max_row_tokens: int = Field(default=1024, ge=8)
    token_weight: float = 0.5
    square_weight: float = 0.25
    patch_weight: float = 0.25
    seed: int = 0


class OptimizerSpec(Section):
    """AdamW, and the learning rate's course: linear warm-up, then a cosine to a fraction."""

    lr: float = Field(default=1e-3, gt=0)
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = Field(default=0.05, ge=0)
    warmup_steps: int = Field(default=50, ge=0)
    final_lr_fraction: float = Field(default=0.05, ge=0, le=1)
    max_grad_norm: float = Field(default=1.0, gt=0)


class Identity(Record):
    """What a run is. Its hash names the run; nothing of where or how fast it runs is in it."""

    manifest_sha256: str
    processor_sha256: str
    model: ModelSpec
    schedule: ScheduleSpec
    buckets: Buckets
    optimizer: OptimizerSpec
    num_steps: int
    seed: int

    @property
    def sha256(self) -> str:
        """The identity's hash; its first twelve digits are the run's id."""
        return sha256_json(self.model_dump(mode="json"))


class Placement(Record):
    """Where and how a run runs; may change between attempts, never changes the name.

    Paths are relative to the project's folder, where the ranks run.
    """

    layout: Layout
    num_workers: int
    threads_per_rank: int
    log_every_steps: int
    checkpoint_every_steps: int
    checkpoint_min_interval_s: float
    keep_checkpoints: int
    heldout_every_steps: int
    heldout_max_samples: int
    max_restarts: int
    shards: str
    manifest: str
    sample_costs: str
    processor: str


class Provenance(Record):
    """Which code and packages made it."""

    git_commit: str | None
    git_dirty: bool | None
    source_sha256: str
    versions: dict[str, str]


class RunSpec(Record):
    """`run_spec`: one JSON file with three parts, of which the identity alone makes the name."""

    version: int = FORMAT_VERSION
    identity: Identity
    placement: Placement
    provenance: Provenance

    @property
    def run_id(self) -> str:
        """Twelve digits of the identity's hash."""
        return self.identity.sha256[:12]


class LoaderState(Record):
    """Where the loader is: the next step, and what was masked or skipped so far."""

    epoch: int = 0
    step: int = 0
    schedule_sha256: str = ""
    masked_keys: tuple[str, ...] = ()
    skipped_steps: tuple[int, ...] = ()


class StepRecord(Record):
    """`step_record`: the numbers of one optimizer step over all ranks; not measured is None.

    `step` counts from 1. `loss` and `grad_norm` are None where they were not finite; such a step is
    `skipped`: no weight has changed. `num_masked` and `num_skipped` count from the run's start.
    """

    step: int
    epoch: int
    loss: float | None
    lr: float
    grad_norm: float | None
    num_rows: int
    num_label_tokens: int
    num_text_tokens: int
    num_image_tokens: int
    num_patches: int
    padding_fraction: float
    step_s: float
    data_s: float
    tokens_per_s: float
    heldout_loss: float | None = None
    skipped: bool = False
    num_masked: int = 0
    num_skipped: int = 0
    attempt: int = 0


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


class Parity(Record):
    """`parity`: how far the reloaded release is from the trained model."""

    release_sha256: str
    run_id: str
    max_abs: float
    max_rel: float
    tolerance: float
    num_samples: int
    num_logits: int
    missing_keys: tuple[str, ...]
    extra_keys: tuple[str, ...]
    tokens_equal: bool
    passed: bool


class Interval(Record):
    """A mean with its bootstrap interval; n is the number of questions."""

    value: float
    low: float
    high: float
    n: int


class Scores(Record):
    """`scores`: exact match of a release on held-out questions, with and without the images."""

    release_sha256: str
    manifest_sha256: str
    exact_match: dict[str, Interval]
    blind_exact_match: dict[str, Interval]
    exact_match_by_bucket: dict[str, Interval]
    num_questions: int
    num_images: int
    generate_s: float


class Link(Record):
    """One link of the lineage: what one artefact says of the one before it, and if it holds."""

    name: str
    expected: str
    found: str

    @property
    def holds(self) -> bool:
        """Say whether both ends name the same thing."""
        return self.expected == self.found


class Lineage(Record):
    """`lineage`: from a score back to the raw bytes, with every link compared."""

    raw_samples: RawSamples
    manifest_sha256: str
    num_parameters: int
    run_spec: RunSpec
    run: Run
    parity: Parity
    links: tuple[Link, ...]


class Summary(Record):
    """`summary`: what scripts read; what was not measured is null.

    `read_` is the starter's main task, numbers of 1 to 4 digits. `run_s` is the wall time of a
    whole run, so null where the training is an earlier one's.
    """

    exact_match: float | None
    exact_match_low: float | None
    exact_match_high: float | None
    blind_exact_match: float | None
    read_exact_match: float | None
    read_exact_match_low: float | None
    read_exact_match_high: float | None
    blind_read_exact_match: float | None
    parity_max_abs: float | None
    num_steps: int | None
    final_loss: float | None
    run_s: float | None
    release: str | None
    manifest_sha256: str | None
    run_id: str | None
