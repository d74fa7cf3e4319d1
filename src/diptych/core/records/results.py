"""Records of what came out: parity, scores, lineage, summary."""

from __future__ import annotations

from pydantic import Field

from diptych.core.records.base import Record
from diptych.core.records.data import RawSamples
from diptych.core.records.run import Run, RunSpec


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


class Attachment(Record):
    """`attachment`: what a release is called in the tracker of its run.

    `artifact` is None where it is attached to none: `error` says why, or the run asks for none.
    """

    release_sha256: str
    run_id: str
    artifact: str | None = None
    error: str | None = None


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
    exact_match_by_source: dict[str, Interval] = Field(default_factory=dict)
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
