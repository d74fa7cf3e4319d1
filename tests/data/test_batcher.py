"""Samples of several sources in one batch, and a loader's workers over many steps."""

from __future__ import annotations

import itertools

import numpy as np
import psutil
import pytest

from diptych.core.errors import FormatError
from diptych.core.records import Manifest, ScheduleSpec
from diptych.data.batcher import Batcher
from diptych.data.costs import load_costs
from diptych.data.indexing.index import IndexParams, index
from diptych.data.loader import Loader
from diptych.data.schedule.ragged import pack_rows
from diptych.data.schedule.schedule import Schedule
from diptych.data.shards.shard import ShardParams, shard
from tests.data.conftest import Dataset


@pytest.fixture
def two_sources(tmp_path):
    """Shards of the sources 'few' (2 samples) and 'many' (5)."""
    parts = []
    for name, count in (("few", 2), ("many", 5)):
        dataset = Dataset(tmp_path / name)
        for number in range(count):
            image = dataset.image(f"{number}.png", seed=100 * count + number)
            dataset.add(f"{number}", image, answer=str(number))
        parts += dataset.write(source=name).sources
    raw_samples = dataset.write().model_copy(update={"sources": tuple(parts)})
    sample_index, quarantine = index(raw_samples, IndexParams(), str(tmp_path / "index"))
    return shard(sample_index, raw_samples, quarantine, ShardParams(), str(tmp_path / "shards"))


def make_batcher(corpus, shards, manifest: Manifest, **options) -> Batcher:
    return Batcher(
        shards=shards, manifest=manifest, processor=corpus.processor, split="train", **options
    )


def rows(*parts: list[int]):
    return pack_rows([np.array(part, dtype=np.int64) for part in parts])


def test_each_token_and_count_keeps_its_source(corpus, two_sources):
    shards, manifest = two_sources
    assert manifest.sources == ("few", "many")
    batch, masked = make_batcher(corpus, shards, manifest, row_tokens=64).make(
        rows([0, 2], [], [6, 1])
    )
    assert not masked
    assert batch.num_samples_by_source.tolist() == [2, 2]
    # Each answer is one digit and the token that ends its turn.
    assert batch.num_label_tokens_by_source.tolist() == [4, 4]
    sources = [list(dict.fromkeys(row_S.tolist())) for row_S in batch.source_ids_BS]
    assert sources == [[0, 1, -1], [-1], [1, 0, -1]]


def test_a_missing_shard_is_no_bad_sample(corpus, two_sources):
    shards, manifest = two_sources
    (shards / manifest.shards[1].path).unlink()
    batcher = make_batcher(corpus, shards, manifest)
    assert batcher.make(rows([0], [1]))[0].num_samples == 2
    with pytest.raises(FormatError, match=r"many-000000\.tar' cannot be read"):
        batcher.make(rows([2]))


def test_a_worker_does_not_grow(corpus):
    """40 epochs: a worker that kept one image of each step would grow by 20 MiB."""
    costs = load_costs(corpus.sample_costs, manifest=corpus.manifest, split="train")
    spec = ScheduleSpec(global_batch=16, group=4, window_shards=2)
    loader = Loader(
        shards=corpus.shards,
        manifest=corpus.manifest,
        processor=corpus.processor,
        schedule=Schedule(costs, buckets=corpus.buckets, spec=spec),
        split="train",
        rank=0,
        world_size=1,
        micro_batch=4,
        num_workers=1,
    )
    before = set(psutil.Process().children())
    sizes = []
    for batch in itertools.islice(loader, 200):
        if batch.step % 40 == 39:
            (worker,) = set(psutil.Process().children()) - before
            sizes.append(worker.memory_full_info().uss / 2**20)
    # What it holds of its own grows at first: pages that it shares until one of the two writes.
    assert sizes[-1] - sizes[1] < 10, f"MiB: {sizes}"
