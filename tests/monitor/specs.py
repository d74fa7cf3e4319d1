"""A run's spec without a corpus: for what only looks at it."""

from __future__ import annotations

from typing import Any

from diptych.core.records import (
    Buckets,
    Identity,
    Layout,
    ModelSpec,
    ObserveSpec,
    OptimizerSpec,
    Placement,
    Provenance,
    RunSpec,
    ScheduleSpec,
)


def make_spec(*, identity: dict[str, Any] | None = None, **placement: Any) -> RunSpec:
    """Make a spec; `placement` has fields of it that differ."""
    return RunSpec(
        identity=Identity(
            **{
                "manifest_sha256": "a" * 64,
                "processor_sha256": "b" * 64,
                "model": ModelSpec(),
                "schedule": ScheduleSpec(),
                "buckets": Buckets(areas_px=(), aspects=()),
                "optimizer": OptimizerSpec(),
                "num_steps": 100,
                "seed": 0,
                **(identity or {}),
            }
        ),
        placement=Placement(
            **{
                "layout": Layout(),
                "num_workers": 0,
                "threads_per_rank": 1,
                "log_every_steps": 1,
                "checkpoint_every_steps": 50,
                "checkpoint_min_interval_s": 0.0,
                "keep_checkpoints": 2,
                "heldout_every_steps": 0,
                "heldout_max_samples": 8,
                "max_restarts": 0,
                "shards": "shards",
                "manifest": "manifest.json",
                "sample_costs": "costs",
                "processor": "processor",
                "observe": ObserveSpec(sample_every_s=0.0),
                **placement,
            }
        ),
        provenance=Provenance(git_commit="c0ffee", git_dirty=False, source_sha256="s", versions={}),
    )
