"""In: records and tables of the workflow. Out: the rows of the page's tables, ready to be shown.

Only arithmetic that a table needs is here (sums, medians, shares); what was not measured is None.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from diptych.core.layouts import options_of
from diptych.core.records import (
    IMAGE_PLACEHOLDER,
    Buckets,
    Layout,
    Manifest,
    Plan,
    Prediction,
    Run,
    Scores,
)
from diptych.data.bucket import bucket_name, bucket_of, num_buckets
from diptych.data.costs import load_costs
from diptych.report.figures import order_kinds
from diptych.report.pictures import data_uri
from diptych.report.steps import Steps


@dataclass(frozen=True)
class Split:
    """What the data of one split costs; lengths are in tokens of a row."""

    name: str
    num_samples: int
    num_images: int
    median_tokens: float
    high_tokens: float
    max_tokens: int
    image_share: float


def cost_rows(
    manifest: Manifest, *, sample_costs: Path, buckets: Buckets
) -> tuple[list[Split], dict[str, Counter[int]]]:
    """Measure every split's lengths, and count its samples per bucket.

    Returns:
        One `Split` per split, and per split the number of samples of each bucket.
    """
    splits, counts = [], {"train": Counter(), "heldout": Counter()}
    for split in ("train", "heldout"):
        costs = load_costs(sample_costs, manifest=manifest, split=split)
        if not costs.num_samples:
            continue
        num_tokens = costs.column("num_tokens")
        splits.append(
            Split(
                name=split,
                num_samples=costs.num_samples,
                num_images=int(costs.column("num_images").sum()),
                median_tokens=float(np.median(num_tokens)),
                high_tokens=float(np.percentile(num_tokens, 95)),
                max_tokens=int(num_tokens.max()),
                image_share=float(costs.column("num_image_tokens").sum() / num_tokens.sum()),
            )
        )
        kinds = bucket_of(buckets, costs.column("area_px"), costs.column("aspect"))
        counts[split] = Counter(kinds.tolist())
    return splits, counts


def score_rows(scores: Scores) -> list[dict[str, Any]]:
    """Put every kind's exact match beside its blind baseline, the headline first.

    `gains` says whether the images clearly help: the two intervals do not meet.
    """
    rows = []
    for kind in order_kinds(scores):
        exact, blind = scores.exact_match[kind], scores.blind_exact_match.get(kind)
        gains = None if blind is None else exact.low > blind.high
        rows.append({"kind": kind, "exact": exact, "blind": blind, "gains": gains})
    return rows


def bucket_rows(
    scores: Scores, *, buckets: Buckets, counts: dict[str, Counter[int]]
) -> list[dict[str, Any]]:
    """Put every bucket's scores beside the number of its samples; empty buckets are left out."""
    rows = []
    for bucket in range(num_buckets(buckets)):
        name = bucket_name(buckets, bucket)
        num_train, num_heldout = counts["train"][bucket], counts["heldout"][bucket]
        exact = scores.exact_match_by_bucket.get(name)
        if num_train or num_heldout or exact:
            rows.append(
                {
                    "bucket": bucket,
                    "name": name,
                    "num_train": num_train,
                    "num_heldout": num_heldout,
                    "exact": exact,
                }
            )
    return rows


def plan_rows(plan: Plan) -> tuple[list[Prediction], list[Prediction]]:
    """Split the plan into layouts that can run, best first, and refused ones."""
    able = [prediction for prediction in plan.predictions if prediction.refused is None]
    refused = [prediction for prediction in plan.predictions if prediction.refused is not None]
    return able, refused


def predicted(plan: Plan, *, layout: Layout) -> Prediction | None:
    """Return the plan's prediction for the layout that ran."""
    return next((entry for entry in plan.predictions if entry.layout == layout), None)


def name_layout(layout: Layout) -> str:
    """Write a layout in words: engine, axes, micro-batch, precision, what is not the default."""
    axes = [
        f"{axis} {size}"
        for axis in ("dp", "shard", "tp", "pp", "cp")
        if (size := getattr(layout, axis)) > 1
    ]
    spread = " x ".join(axes) if axes else "one process"
    return (
        f"{layout.engine}, {spread}, micro-batch {layout.micro_batch}, "
        f"{layout.precision} on {layout.device}"
        + (", reduced after every micro-batch" if layout.grad_sync == "every" else "")
        + "".join(f", {option}" for option in options_of(layout))
    )


def how_rows(layout: Layout, *, run: Run, steps: Steps) -> list[tuple[str, str]]:
    """Say how the run ran: what its layout departs in, what was skipped, what was compiled."""
    whys = [record.nonfinite for record in steps.records if record.nonfinite]
    skipped = f"{run.num_skipped:,} of {run.num_steps:,}"
    rows = [
        ("mathematics", "; ".join(layout.departures) or "that of one process"),
        ("skipped steps", "; ".join([skipped, *whys[-1:]])),
    ]
    scales = steps.column("loss_scale")
    scales = scales[np.isfinite(scales)]
    if len(scales):
        rows.append(("loss scale", f"{scales[-1]:g} in the last step, from {scales[0]:g}"))
    recompiles = steps.column("num_recompiles")[-1:]
    if np.isfinite(recompiles).any():
        rows.append(("recompiles", f"{int(recompiles[0]):,} in the last attempt"))
    return rows


def example_rows(examples: pa.Table) -> list[dict[str, Any]]:
    """Turn the images of the examples into data URIs; an unreadable one into None."""
    rows = examples.to_pylist()
    for row in rows:
        row["question"] = _number_images(row["question"], num_images=len(row["images"]))
        row["uris"] = [
            data_uri(media_type, data=data) if media_type else None
            for media_type, data in zip(row["image_types"], row["images"], strict=True)
        ]
    return rows


def _number_images(question: str, *, num_images: int) -> str:
    """Write the places of images as a reader sees them: numbered where there are several."""
    if num_images == 1:
        return question.replace(IMAGE_PLACEHOLDER, "").strip()
    parts = question.split(IMAGE_PLACEHOLDER)
    marked = enumerate((part.removeprefix("\n") for part in parts[1:]), 1)
    return parts[0] + "".join(f"[image {place}] {part}" for place, part in marked)
