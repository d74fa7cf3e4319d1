"""A finished run as the workflow leaves it, made small and by hand: no training, no torch."""

from __future__ import annotations

import io
import json
import math
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image, ImageDraw

from diptych.core.hashing import sha256_file
from diptych.core.records import (
    Buckets,
    Cluster,
    Device,
    Identity,
    Interval,
    Layout,
    Manifest,
    ModelShape,
    ModelSpec,
    OptimizerSpec,
    Parameter,
    Parity,
    Placement,
    Plan,
    Prediction,
    Provenance,
    RawPart,
    RawSamples,
    RawSource,
    Run,
    RunSpec,
    ScheduleSpec,
    Scores,
    Shard,
    TrainedRow,
    WhatTrains,
)
from diptych.core.tables import PREDICTIONS, QUARANTINE, SAMPLE_COSTS, SHARD_INDEX
from diptych.data.costs import SUMMARY_NAME
from diptych.data.measure import SUMMARY, costs_path, summarize
from diptych.monitor.run_folder import RunFolder

from .logs import write_attempts, write_sample, write_steps

HASHES = {
    name: f"{place:x}" * 64 for place, name in enumerate(("release", "processor", "code"), 10)
}
MARKUP = "<script>alert('x')</script><b>bold</b>"
KINDS = ("read", "count", "compare", "text")
LAYOUT = Layout(dp=2, micro_batch=8)


@dataclass(frozen=True)
class Finished:
    """Everything that the report's nodes take."""

    raw_samples: RawSamples
    manifest: Manifest
    model_shape: ModelShape
    run_spec: RunSpec
    run: Run
    plan: Plan
    parity: Parity
    scores: Scores
    predictions: pa.Table
    quarantine: pa.Table
    shards: Path
    sample_costs: Path
    release: Path
    data_section: str = "<p>THE DATA'S OWN SECTION</p>"


@pytest.fixture
def finished(tmp_path: Path) -> Finished:
    """A run of 120 steps on 96 and 24 samples, scored and verified."""
    return build(tmp_path, num_steps=120)


def build(folder: Path, *, num_steps: int) -> Finished:
    """Write a run's files into a folder and return its records."""
    shards, sample_costs = folder / "shards", folder / "sample_costs"
    manifest = Manifest(
        shards=tuple(
            _write_shard(split, num_samples=count, shards=shards, sample_costs=sample_costs)
            for split, count in (("train", 96), ("heldout", 24))
        ),
        quarantined={"starter": {"truncated_image": 1}},
    )
    identity = {
        "version": 1,
        "manifest_sha256": manifest.sha256,
        "processor_sha256": HASHES["processor"],
    }
    _write_summary(manifest, sample_costs=sample_costs)
    (sample_costs / "costs.json").write_text(json.dumps(identity), encoding="utf-8")
    run_spec = _run_spec(manifest, num_steps=num_steps)
    run = Run(
        run_id=run_spec.run_id,
        identity_sha256=run_spec.identity.sha256,
        folder=str(folder / "runs" / run_spec.run_id),
        checkpoint=f"runs/{run_spec.run_id}/checkpoints/step-{num_steps:08d}",
        num_steps=num_steps,
        final_loss=0.0412,
        final_heldout_loss=0.0731,
        train_s=318.4,
        num_attempts=2,
        world_size=2,
        num_masked=0,
        num_skipped=0,
        source_sha256=HASHES["code"],
    )
    write_steps(Path(run.folder), num_steps=num_steps)
    write_attempts(Path(run.folder), num_steps=num_steps)
    write_sample(Path(run.folder))
    RunFolder(Path(run.folder)).write_what_trains(
        WhatTrains(
            rows=(
                _trained("vision", optimizer=None, lr=None, weight_decay=None),
                _trained("language", optimizer="adamw", lr=1.25e-3, weight_decay=0.05),
            )
        )
    )
    predictions = _predictions()
    return Finished(
        raw_samples=_raw_samples(),
        manifest=manifest,
        model_shape=ModelShape(
            family="qwen3_vl",
            parameters=(
                Parameter(
                    name="w", shape=(1464, 1000), dtype="float32", tower="language", block="w"
                ),
            ),
            sizes={},
            tied_parameters={},
        ),
        run_spec=run_spec,
        run=run,
        plan=_plan(),
        parity=Parity(
            release_sha256=HASHES["release"],
            run_id=run.run_id,
            max_abs=2.9e-6,
            max_rel=4e-7,
            tolerance=1e-5,
            num_samples=16,
            num_logits=262_144,
            missing_keys=(),
            extra_keys=(),
            tokens_equal=True,
            passed=True,
        ),
        scores=_scores(manifest),
        predictions=predictions,
        quarantine=pa.Table.from_pylist(
            [
                {
                    "key": "starter/broken",
                    "source": "starter",
                    "reason": "truncated_image",
                    "value": MARKUP,
                    "detail": "The image's file ends too early.",
                    "image_path": "images/broken.jpg",
                    "image_file": "images/broken.jpg",
                    "image_offset": -1,
                    "image_length": -1,
                }
            ],
            schema=QUARANTINE,
        ),
        shards=shards,
        sample_costs=sample_costs,
        release=folder / "release",
    )


def _write_summary(manifest: Manifest, *, sample_costs: Path) -> None:
    rows = [
        summarize(pq.read_table(sample_costs / costs_path(shard)), path=shard.path)
        for shard in manifest.shards
    ]
    pq.write_table(pa.Table.from_pylist(rows, schema=SUMMARY), sample_costs / SUMMARY_NAME)


def _trained(tower: str, **fields: Any) -> TrainedRow:
    return TrainedRow.model_validate(
        {"tower": tower, "num_tensors": 12, "num_parameters": 34_567, **fields}
    )


def _digits(text: str, *, width_px: int, height_px: int, suffix: str) -> bytes:
    image = Image.new("L", (width_px, height_px), 250)
    ImageDraw.Draw(image).text((6, height_px // 2 - 14), text, fill=20, font_size=28)
    out = io.BytesIO()
    image.save(out, format={"jpg": "JPEG", "png": "PNG"}[suffix])
    return out.getvalue()


def _write_shard(split: str, *, num_samples: int, shards: Path, sample_costs: Path) -> Shard:
    path = shards / split / "starter-000000.tar"
    path.parent.mkdir(parents=True, exist_ok=True)
    index, costs = [], []
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for number in range(num_samples):
            key = f"starter/{split}-{number:04d}"
            num_images = 0 if number % 6 == 5 else 1 + (number % 4 == 3)
            width_px, height_px = 64 + 24 * (number % 5), 48 + 16 * (number % 3)
            members = []
            for place in range(num_images):
                suffix = "png" if number % 2 else "jpg"
                digits = str(10 * number + place)
                data = _digits(digits, width_px=width_px, height_px=height_px, suffix=suffix)
                members.append((f"{split}-{number:04d}.{place}.{suffix}", data))
            stored = _stored(key, width_px=width_px, height_px=height_px, num_images=num_images)
            members.append((f"{split}-{number:04d}.json", json.dumps(stored).encode()))
            for name, data in members:
                info = tarfile.TarInfo(name)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
            index.append(
                {
                    "key": key,
                    "member_names": [name for name, _ in members],
                    "lengths": [len(data) for _, data in members],
                    "widths_px": [width_px] * num_images,
                    "heights_px": [height_px] * num_images,
                    "text_bytes": 30,
                    "content_hash": "0" * 32,
                }
            )
            costs.append(
                {
                    "key": key,
                    "num_tokens": 40 + 20 * num_images,
                    "num_label_tokens": 4,
                    "num_image_tokens": 20 * num_images,
                    "num_patches": 80 * num_images,
                    "num_images": num_images,
                    "area_px": width_px * height_px * num_images,
                    "aspect": width_px / height_px if num_images else 0.0,
                    "status": "ok",
                }
            )
    _add_offsets(index, path=path)
    index_path = path.with_suffix(".parquet")
    pq.write_table(pa.Table.from_pylist(index, schema=SHARD_INDEX), index_path)
    costs_path = sample_costs / split / "starter-000000.parquet"
    costs_path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(costs, schema=SAMPLE_COSTS), costs_path)
    return Shard(
        path=path.relative_to(shards).as_posix(),
        index_path=index_path.relative_to(shards).as_posix(),
        split=split,
        source="starter",
        num_samples=num_samples,
        num_images=sum(row["num_images"] for row in costs),
        num_bytes=path.stat().st_size,
        sha256="1" * 64,
        index_sha256=sha256_file(index_path),
    )


def _stored(key: str, *, width_px: int, height_px: int, num_images: int) -> dict:
    image = {"path": "x.jpg", "width_px": width_px, "height_px": height_px, "format": "jpeg"}
    return {
        "key": key,
        "source": "starter",
        "messages": [
            {"role": "user", "text": "<image>" * num_images + "Which number is written here?"},
            {"role": "assistant", "text": "4"},
        ],
        "kinds": ["read"],
        "images": [image] * num_images,
    }


def _add_offsets(index: list[dict], *, path: Path) -> None:
    with tarfile.open(path) as tar:
        offsets = {member.name: member.offset_data for member in tar.getmembers()}
    for row in index:
        row["offsets"] = [offsets[name] for name in row["member_names"]]


def _raw_samples() -> RawSamples:
    return RawSamples(
        sources=(
            RawSource(
                name="starter",
                kind="llava",
                split=None,
                heldout_fraction=0.2,
                root="data/01_raw/starter",
                images="data/01_raw/starter",
                parts=(RawPart(path="train.json", num_bytes=9_000, stamp="sha256:" + "3" * 64),),
                listing_sha256="4" * 64,
                num_image_files=117,
            ),
        )
    )


def _run_spec(manifest: Manifest, *, num_steps: int) -> RunSpec:
    return RunSpec(
        identity=Identity(
            manifest_sha256=manifest.sha256,
            processor_sha256=HASHES["processor"],
            model=ModelSpec(sizes={"text": {"hidden_size": 128}}),
            schedule=ScheduleSpec(),
            buckets=Buckets(areas_px=(6_000, 9_000), aspects=(0.9, 2.0)),
            optimizer=OptimizerSpec(warmup_steps=12),
            num_steps=num_steps,
            seed=0,
        ),
        placement=Placement(
            layout=LAYOUT,
            num_workers=0,
            threads_per_rank=1,
            log_every_steps=1,
            checkpoint_every_steps=100,
            checkpoint_min_interval_s=30.0,
            keep_checkpoints=2,
            heldout_every_steps=100,
            heldout_max_samples=128,
            max_restarts=3,
            shards="data/05_model_input/shards",
            manifest="data/05_model_input/manifest.json",
            sample_costs="data/05_model_input/sample_costs",
            processor="data/04_feature/processor",
        ),
        provenance=Provenance(
            git_commit="c0ffee" * 6 + "c0ff",
            git_dirty=True,
            source_sha256=HASHES["code"],
            versions={"diptych": "0.1.0", "torch": "2.14.1", "transformers": "5.24.0"},
        ),
    )


def _plan() -> Plan:
    device = Device(kind="cpu", name="Xeon", memory_bytes=8 << 30, flops_per_s={"fp32": 4e10})
    cluster = Cluster(
        num_nodes=1,
        num_devices_per_node=2,
        device=device,
        num_cores_per_node=2,
        host_memory_bytes=16 << 30,
    )
    return Plan(
        cluster=cluster,
        global_batch=32,
        predictions=(
            Prediction(layout=LAYOUT, held_bytes=24 << 20, peak_bytes=190 << 20, step_s=0.31),
            Prediction(
                layout=Layout(engine="fsdp2", shard=2, micro_batch=8),
                held_bytes=12 << 20,
                peak_bytes=170 << 20,
                step_s=0.44,
            ),
            Prediction(
                layout=Layout(micro_batch=8), held_bytes=24 << 20, peak_bytes=200 << 20, step_s=None
            ),
            Prediction(
                layout=Layout(dp=2, micro_batch=8, precision="bf16"),
                held_bytes=20 << 20,
                peak_bytes=150 << 20,
                step_s=0.9,
                refused="bf16 is emulated on this CPU and slower than fp32.",
            ),
        ),
        asked=("plan.layout.micro_batch 8",),
    )


def _scores(manifest: Manifest) -> Scores:
    def interval(value: float, n: int) -> Interval:
        half = 1.96 * math.sqrt(value * (1 - value) / n)
        return Interval(value=value, low=max(0, value - half), high=min(1, value + half), n=n)

    return Scores(
        release_sha256=HASHES["release"],
        manifest_sha256=manifest.sha256,
        exact_match={
            "all": interval(0.905, 840),
            "read": interval(0.963, 420),
            "count": interval(0.842, 180),
            "compare": interval(0.91, 140),
            "text": interval(1.0, 100),
        },
        blind_exact_match={
            "all": interval(0.21, 840),
            "read": interval(0.031, 420),
            "count": interval(0.25, 180),
            "compare": interval(0.5, 140),
            "text": interval(1.0, 100),
        },
        exact_match_by_source={"starter": interval(0.905, 840)},
        exact_match_by_bucket={
            "text only": interval(1.0, 60),
            "area under 6,000 px, aspect 0.9 to 2": interval(0.97, 300),
            "area from 9,000 px, aspect from 2": interval(0.82, 480),
        },
        num_questions=840,
        num_images=512,
        generate_s=41.8,
    )


def _predictions() -> pa.Table:
    rows = []
    for number in range(24):
        for turn in range(2):
            place = 2 * number + turn
            answer = str(10 * number)
            correct = place % 7 != 3
            rows.append(
                {
                    "key": f"starter/heldout-{number:04d}",
                    "turn": turn,
                    "kind": KINDS[place % 4],
                    "bucket": number % 7,
                    "question": MARKUP if place == 3 else "<image>\nWhich number is written here?",
                    "answer": answer,
                    "prediction": answer if correct else answer[::-1] + "7",
                    "blind_prediction": "4",
                    "correct": correct,
                    "blind_correct": False,
                    "image_key": f"image-{number}",
                }
            )
    return pa.Table.from_pylist(rows, schema=PREDICTIONS)
