"""The files that a run of two attempts on two ranks leaves in its folder, written by hand."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

from diptych.core.records import NodeSample, Over, Phase, StepRecord
from diptych.monitor.run_folder import RunFolder

BEGAN_S = 1_770_000_000.0
"""2026-02-02 02:40:00 UTC; a step a second."""
GAP_S = 60.0
PHASES_S: dict[Phase, Over] = {
    "data": Over(0.005, 0.01, 0.015, 1),
    "forward": Over(0.08, 0.08, 0.08, 0),
    "backward": Over(0.10, 0.12, 0.14, 1),
    "communication": Over(0.02, 0.04, 0.06, 0),
    "update": Over(0.02, 0.02, 0.02, 0),
    "other": Over(0.01, 0.01, 0.01, 0),
}
"""The means add up to 0.28 s."""


def write_steps(folder: Path, *, num_steps: int) -> list[StepRecord]:
    """Write a step log with the course of an ordinary run; resumed after two thirds."""
    folder.mkdir(parents=True, exist_ok=True)
    noise = random.Random(7)
    records = []
    for step in range(1, num_steps + 1):
        part = step / num_steps
        loss = 0.03 + 3.6 * math.exp(-7 * part) * noise.uniform(0.75, 1.3) + noise.uniform(0, 0.03)
        step_s = 0.28 * noise.uniform(0.92, 1.2)
        records.append(
            StepRecord(
                step=step,
                epoch=step // 50,
                loss=loss,
                lr=1e-3 * min(step / (0.1 * num_steps), 0.05 + 0.95 * math.cos(part * 1.5) ** 2),
                grad_norm=3 * math.exp(-3 * part) * noise.uniform(0.4, 1.8),
                num_rows=32,
                num_samples=32,
                num_label_tokens=100,
                num_text_tokens=900,
                num_image_tokens=1_100,
                num_patches=4_400,
                padding_fraction=0.04,
                idle_fraction=None if step == 1 else 0.02,
                loss_by_source={"starter": loss} if step % 2 else {},
                step_s=step_s,
                data_s=0.012 * noise.uniform(0.5, 3),
                tokens_per_s=2_000 / step_s,
                heldout_loss=0.07 + 4 * math.exp(-7 * part)
                if step % (num_steps // 10) == 0
                else None,
                attempt=int(part > 2 / 3),
                time_s=BEGAN_S + step + (GAP_S if part > 2 / 3 else 0),
                phases_s=PHASES_S,
                memory_bytes={"host": Over(140 << 20, 145 << 20, 152 << 20, 1)},
            )
        )
    text = "".join(record.model_dump_json() + "\n" for record in records)
    (folder / "steps.jsonl").write_text(text, encoding="utf-8")
    return records


def write_attempts(folder: Path, *, num_steps: int, **facts: Any) -> None:
    """Write the notes of both attempts; the first was stopped on request."""
    run_folder, at_step = RunFolder(folder), 2 * num_steps // 3
    attention = {"kernel": "sdpa", "why": "on a CPU", "passed_over": {}}
    for number in range(2):
        began_s = BEGAN_S + number * (at_step + GAP_S)
        run_folder.append_attempt(
            {
                "started_s": began_s,
                "from_step": number * at_step,
                "changes": ["keep_checkpoints: 2 -> 3"] if number else [],
                "former": {"state": "stopped", "by": "request"} if number else {},
                "attention": attention,
                "passed_over": [],
                **facts,
            }
        )


def write_sample(folder: Path) -> None:
    """Write one look at the host: the ranks and their loaders hold 320 MiB."""
    (folder / "samples").mkdir()
    sample = NodeSample(time_s=BEGAN_S, node="a", attempt=0, ranks_memory_bytes=320 << 20)
    (folder / "samples" / "a.jsonl").write_text(sample.model_dump_json() + "\n", "utf-8")


def rewrite(folder: Path, **changes: Any) -> None:
    """Change fields of every step's record."""
    run_folder = RunFolder(folder)
    records = [record.model_copy(update=changes) for record in run_folder.read_steps()]
    text = "".join(record.model_dump_json() + "\n" for record in records)
    run_folder.steps.write_text(text, encoding="utf-8")
