"""What the first rank notes as ranks begin and end: for the launcher, and for whoever reads later.

In: a run's spec and how far it is. Out: lines and files of the run's folder. No torch.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from diptych.core import provenance
from diptych.core.records import Run, RunSpec
from diptych.launch.changes import placement_changes
from diptych.monitor.run_folder import RunFolder


def open_attempt(folder: RunFolder, *, spec: RunSpec, step: int, facts: Mapping[str, Any]) -> int:
    """Note an attempt and drop the log of steps that will be done again; returns its number."""
    before = folder.read_attempts()
    changes = placement_changes(before[-1]["placement"], spec.placement) if before else []
    folder.cut_steps(step)
    attempt = folder.append_attempt(
        {
            "started_s": round(time.time(), 3),
            "from_step": step,
            "changes": changes,
            "former": folder.read_ending() if before else {},
            "placement": spec.placement.model_dump(mode="json"),
            "provenance": provenance.read().model_dump(mode="json"),
            **facts,
        }
    )
    folder.write_status("running", step=step, num_steps=spec.identity.num_steps)
    return attempt


def stop_attempt(folder: RunFolder, *, spec: RunSpec, step: int) -> None:
    """Say that the ranks have saved and stopped, and whether a file or a signal asked for it."""
    by = "request" if folder.stop.exists() else "signal"
    folder.write_status("stopped", step=step, num_steps=spec.identity.num_steps, by=by)
    with suppress(FileNotFoundError):
        folder.stop.unlink()


def finish_run(
    folder: RunFolder, *, spec: RunSpec, num_masked: int, num_skipped: int, started_s: float
) -> None:
    """Write the record of a run whose every step is done."""
    steps = folder.read_steps()
    heldout = [step.heldout_loss for step in steps if step.heldout_loss is not None]
    num_steps = spec.identity.num_steps
    checkpoint = folder.checkpoints / f"step-{num_steps:08d}"
    folder.write_run(
        Run(
            run_id=spec.run_id,
            identity_sha256=spec.identity.sha256,
            folder=folder.path.as_posix(),
            checkpoint=checkpoint.as_posix(),
            num_steps=num_steps,
            final_loss=steps[-1].loss,
            final_heldout_loss=heldout[-1] if heldout else None,
            train_s=round(sum(step.step_s for step in steps), 3),
            num_attempts=folder.count_attempts(),
            world_size=spec.placement.layout.world_size,
            num_masked=num_masked,
            num_skipped=num_skipped,
            source_sha256=spec.provenance.source_sha256,
        )
    )
    attempt_s = time.time() - started_s
    folder.write_status("finished", step=num_steps, num_steps=num_steps, attempt_s=attempt_s)
