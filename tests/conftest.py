"""Shared by all tests: a tiny prepared corpus, a tiny model, and pools of real ranks."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("DO_NOT_TRACK", "1")

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from diptych.core.records import Buckets, Manifest, ModelSpec, ScheduleSpec
from tests.ranks import RankPool

TINY_MODEL = ModelSpec(
    family="qwen3_vl",
    sizes={
        "text": {
            "vocab_size": 512,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 16,
        },
        "vision": {
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "deepstack_visual_indexes": [0],
            "num_position_embeddings": 64,
            "patch_size": 8,
            "temporal_patch_size": 1,
        },
    },
)

TINY_SCHEDULE = ScheduleSpec(global_batch=8, group=4, window_shards=2)
TINY_PACKS = ScheduleSpec(mode="pack", global_batch=6, window_shards=2, max_row_tokens=160)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write-tables",
        action="store_true",
        help="write the tables of docs/ that slow tests measure",
    )


@dataclass(frozen=True)
class Corpus:
    """A prepared corpus: what `prepare` leaves behind, for 80 training and 24 held-out samples."""

    raw: Path
    sample_index: Path
    shards: Path
    manifest_path: Path
    manifest: Manifest
    processor: Path
    sample_costs: Path
    buckets: Buckets


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    from diptych.data.bucket import BucketParams, bucket
    from diptych.data.costs import measure
    from diptych.data.indexing.index import IndexParams, index
    from diptych.data.processor import ProcessorParams, fit
    from diptych.data.shards.shard import ShardParams, shard
    from diptych.data.sources import SourceParams, gather
    from diptych.data.sources.starter import build_starter

    root = tmp_path_factory.mktemp("corpus")
    raw = root / "raw"
    build_starter(raw, num_train=80, num_heldout=24, seed=0)
    raw_samples = gather({"digits": SourceParams(kind="starter", path=str(raw))})
    sample_index, quarantine = index(raw_samples, IndexParams(), str(root / "sample_index"))
    shards, manifest = shard(
        sample_index, raw_samples, quarantine, ShardParams(max_samples=16), str(root / "shards")
    )
    manifest_path = root / "manifest.json"
    manifest_path.write_text(manifest.model_dump_json())
    processor = fit(sample_index, ProcessorParams(), str(root / "processor"))
    return Corpus(
        raw=raw,
        sample_index=sample_index,
        shards=shards,
        manifest_path=manifest_path,
        manifest=manifest,
        processor=processor,
        sample_costs=measure(manifest, shards, processor, str(root / "sample_costs")),
        buckets=bucket(sample_index, BucketParams()),
    )


@pytest.fixture(scope="session")
def _pools() -> Iterator[dict[int, RankPool]]:
    pools: dict[int, RankPool] = {}
    yield pools
    for pool in pools.values():
        if pool.alive:
            pool.close()


@pytest.fixture(scope="session")
def ranks(_pools: dict[int, RankPool]) -> Callable[[int], RankPool]:
    """Call with a world size to get its pool of real gloo ranks; it lives for the whole session."""

    def get(world_size: int) -> RankPool:
        pool = _pools.get(world_size)
        if pool is None or not pool.alive:
            pool = _pools[world_size] = RankPool(world_size)
        return pool

    return get
