"""A corpus for benchmarks, prepared as `prepare` does: photographs of about 90 kB, 640 x 480.

In: how many samples. Out: shards, manifest, processor, costs and buckets in a folder. `NUM_BASES`
photographs are drawn; each file has a comment of its own, so that no two are equal.
"""

from __future__ import annotations

import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from diptych.core.records import Buckets, Manifest

NUM_BASES = 16
_IMAGE_BYTES = 90_000
_SHARD_SAMPLES = 200


@dataclass(frozen=True)
class Corpus:
    """What `prepare` leaves behind."""

    shards: Path
    manifest: Manifest
    processor: Path
    sample_costs: Path
    buckets: Buckets

    @property
    def tars(self) -> list[str]:
        """The shards' paths."""
        return [str(self.shards / shard.path) for shard in self.manifest.shards]


def make_corpus(folder: Path, *, num_samples: int, num_text_only: int = 0) -> Corpus:
    """Prepare samples with one photograph each, and some without image."""
    from diptych.data.bucket import BucketParams, bucket
    from diptych.data.costs import measure
    from diptych.data.indexing.index import IndexParams, index
    from diptych.data.processor import ProcessorParams, fit
    from diptych.data.shards.shard import ShardParams, shard
    from diptych.data.sources import SourceParams, gather

    raw = folder / "raw"
    _write_samples(raw, num_samples=num_samples, num_text_only=num_text_only)
    source = SourceParams(kind="llava", path=str(raw / "samples.json"), split="train")
    raw_samples = gather({"photographs": source})
    sample_index, quarantine = index(raw_samples, IndexParams(), str(folder / "index"))
    params = ShardParams(max_samples=_SHARD_SAMPLES)
    shards, manifest = shard(sample_index, raw_samples, quarantine, params, str(folder / "shards"))
    # Qwen3-VL's own patches; an image keeps its size.
    cuts = ProcessorParams(patch_px=16, merge=2, temporal_patch=2, max_area_px=1 << 20)
    processor = fit(sample_index, cuts, str(folder / "processor"))
    return Corpus(
        shards=shards,
        manifest=manifest,
        processor=processor,
        sample_costs=measure(manifest, shards, processor, str(folder / "costs")),
        buckets=bucket(sample_index, BucketParams()),
    )


def _write_samples(folder: Path, *, num_samples: int, num_text_only: int) -> None:
    (folder / "images").mkdir(parents=True)
    bases = [photograph(seed) for seed in range(NUM_BASES)]
    rows: list[dict[str, Any]] = []
    for number in range(num_samples + num_text_only):
        row: dict[str, Any] = {"id": f"{number:08d}"}
        question = f"What is number {number}?"
        if number < num_samples:
            row["image"] = f"images/{number:08d}.jpg"
            comment = b"\xff\xfe\x00\x0a%08d" % number
            data = bases[number % NUM_BASES]
            (folder / row["image"]).write_bytes(data[:2] + comment + data[2:])
            question = "<image>\nWhat is in this picture?"
        answer = f"This is photograph {number}. It shows a thing on a table, in soft light."
        turns = [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
        rows.append({**row, "conversations": turns})
    (folder / "samples.json").write_text(json.dumps(rows))


def photograph(seed: int) -> bytes:
    """Make a JPEG of about `_IMAGE_BYTES`: smooth colours and noise."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (12, 16, 3), dtype=np.uint8))
    smooth = np.asarray(coarse.resize((640, 480), Image.Resampling.BICUBIC), dtype=np.float32)
    noisy = smooth + rng.normal(0, 14, smooth.shape)
    picture = Image.fromarray(noisy.clip(0, 255).astype(np.uint8))
    files = []
    for quality in range(40, 96, 5):
        file = io.BytesIO()
        picture.save(file, format="JPEG", quality=quality)
        files.append(file.getvalue())
    return min(files, key=lambda data: abs(len(data) - _IMAGE_BYTES))
