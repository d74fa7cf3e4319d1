"""What a run's folder says to whoever looks at it from outside."""

from __future__ import annotations

from typing import Literal

from diptych.core.records.base import Record

RunState = Literal[
    "checked",
    "queued",
    "starting",
    "running",
    "stopped",
    "finished",
    "failed",
    "lost",
    "damaged",
]
"""`lost`: it says that it goes on, and nothing of it has moved for long. `checked`: only a
preflight has run."""


class RunRow(Record):
    """One run as it stands in a list; what its folder does not say is None.

    `run_id` is the folder's name, `stage` that of the stage it belongs to. `step` is the last one
    that has a record. `tokens_per_s` is a mean of the last steps. `moved_s` is when anything of it
    last changed. `problem` says why it is damaged, or lost.
    """

    run_id: str
    folder: str
    stage: str | None = None
    state: RunState
    step: int | None = None
    num_steps: int | None = None
    loss: float | None = None
    heldout_loss: float | None = None
    tokens_per_s: float | None = None
    kind: str | None = None
    job_id: str | None = None
    host: str | None = None
    started_s: float | None = None
    moved_s: float | None = None
    problem: str | None = None

    @property
    def goes_on(self) -> bool:
        """Whether ranks compute for it, or wait to."""
        return self.state in ("queued", "starting", "running")
