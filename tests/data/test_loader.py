"""Promise 1, same batches; and the loader's half of promise 3, same run after a fault."""

from __future__ import annotations

import itertools
import shutil
from collections import Counter
from dataclasses import fields

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from diptych.core.errors import ConfigError, FormatError
from diptych.core.records import LoaderState, ScheduleSpec
from diptych.data.collate import MicroBatch
from diptych.data.costs import load_costs
from diptych.data.loader import Loader, heldout_batches
from diptych.data.schedule import Schedule

SPEC = ScheduleSpec(global_batch=12, group=4, window_shards=2)
"""80 training samples: 7 steps an epoch, the last with 4 rows of 12 missing."""


@pytest.fixture(scope="module")
def costs(corpus):
    return load_costs(corpus.sample_costs, manifest=corpus.manifest, split="train")


@pytest.fixture(scope="module")
def make_loader(corpus, costs):
    def make(*, spec=SPEC, **options):
        settings = {
            "shards": corpus.shards,
            "manifest": corpus.manifest,
            "processor": corpus.processor,
            "schedule": Schedule(costs, buckets=corpus.buckets, spec=spec),
            "split": "train",
            "rank": 0,
            "world_size": 1,
            "micro_batch": 4,
            "num_workers": 0,
        }
        return Loader(**{**settings, **options})

    return make


def take(loader, count):
    return list(itertools.islice(loader, count))


def real_rows(batches):
    rows = np.concatenate([batch.rows.reshape(-1) for batch in batches])
    return sorted(rows[rows >= 0].tolist())


def same(one: MicroBatch, other: MicroBatch):
    for field in fields(MicroBatch):
        left, right = getattr(one, field.name), getattr(other, field.name)
        if isinstance(left, torch.Tensor):
            if not torch.equal(left, right):
                return False
        elif left != right:
            return False
    return True


@pytest.mark.parametrize(
    ("world_size", "micro_batch"), [(1, 4), (1, 1), (1, 12), (2, 4), (2, 2), (3, 4), (4, 1), (5, 8)]
)
def test_a_step_has_the_same_rows_on_any_layout(make_loader, world_size, micro_batch):
    ranks = [
        take(
            make_loader(world_size=world_size, rank=rank, micro_batch=micro_batch),
            8,
        )
        for rank in range(world_size)
    ]
    schedule = make_loader().schedule
    for step in range(8):
        epoch, number = schedule.locate(step)
        expected = schedule.rows(epoch)[number]
        shares = [batches[step] for batches in ranks]
        assert real_rows(shares) == sorted(expected[expected >= 0].tolist())
        assert len({len(share.micro_batches) for share in shares}) == 1
        assert {share.step for share in shares} == {step}
        assert {share.epoch for share in shares} == {epoch}
        assert sum(share.num_rows for share in shares) == (expected >= 0).sum()


def test_counts_are_those_of_the_costs(make_loader, costs):
    batches = take(make_loader(), 7)
    assert sum(batch.num_label_tokens for batch in batches) == costs.num_label_tokens.sum()
    assert sum(batch.num_image_tokens for batch in batches) == costs.num_image_tokens.sum()
    assert sum(batch.num_patches for batch in batches) == costs.num_patches.sum()
    text = costs.num_tokens.sum() - costs.num_image_tokens.sum()
    assert sum(batch.num_text_tokens for batch in batches) == text
    assert [batch.num_rows for batch in batches] == [12] * 6 + [8]
    for batch in batches:
        assert batch.num_slots == sum(b.input_ids_BS.numel() for b in batch.micro_batches)
        for micro_batch in batch.micro_batches:
            learnt = micro_batch.labels_BS[:, 1:] != -100
            assert micro_batch.num_label_tokens == learnt.sum()


def test_nothing_is_lost_or_repeated_when_the_world_changes(make_loader):
    """4 ranks to step 3, 2 ranks to step 9, 1 rank to step 21: three epochs, each sample thrice."""
    state, seen = LoaderState(), []
    for world_size, until in ((4, 3), (2, 9), (1, 21)):
        loaders = [
            make_loader(world_size=world_size, rank=rank, state=state) for rank in range(world_size)
        ]
        for loader in loaders:
            seen += take(loader, until - state.step)
        states = {loader.state_dict() for loader in loaders}
        assert len(states) == 1, "every rank is at the same place"
        state = LoaderState.model_validate_json(states.pop().model_dump_json())
        assert state.step == until
    assert state.epoch == 3
    rows = Counter(real_rows(seen))
    assert rows == dict.fromkeys(range(80), 3)


def test_each_epoch_has_each_sample_once_in_another_order(make_loader):
    batches = take(make_loader(), 14)
    first, second = batches[:7], batches[7:]
    assert real_rows(first) == real_rows(second) == list(range(80))
    assert not np.array_equal(first[0].rows, second[0].rows)
    assert {batch.epoch for batch in first} == {0}
    assert {batch.epoch for batch in second} == {1}


@pytest.mark.parametrize("start", [1, 5, 6, 7, 8])
def test_a_resumed_loader_goes_on_bitwise(make_loader, start):
    through = take(make_loader(), 10)
    loader = make_loader()
    take(loader, start)
    resumed = take(make_loader(state=loader.state_dict()), 10 - start)
    for expected, found in zip(through[start:], resumed, strict=True):
        assert (expected.step, expected.epoch) == (found.step, found.epoch)
        np.testing.assert_array_equal(expected.rows, found.rows)
        for pair in zip(expected.micro_batches, found.micro_batches, strict=True):
            assert same(*pair)


def test_the_state_names_the_step_after_the_batch_in_hand(make_loader):
    loader = make_loader()
    assert loader.state_dict() == LoaderState()
    for number, batch in enumerate(itertools.islice(loader, 8)):
        assert batch.step == number
        state = loader.state_dict()
        assert (state.step, state.epoch) == (number + 1, (number + 1) // 7)
        assert state.schedule_sha256 == loader.schedule.sha256


@pytest.mark.parametrize("num_workers", [1, 2])
def test_workers_change_nothing(make_loader, num_workers):
    alone = take(make_loader(state=LoaderState(step=5)), 4)
    loader = make_loader(state=LoaderState(step=5), num_workers=num_workers)
    for expected, found in zip(alone, take(loader, 4), strict=True):
        assert expected.step == found.step
        np.testing.assert_array_equal(expected.rows, found.rows)
        for pair in zip(expected.micro_batches, found.micro_batches, strict=True):
            assert same(*pair)
    assert loader.state_dict().step == 9, "prefetched steps do not count"


@pytest.fixture
def damaged(corpus, tmp_path):
    """The shards with one training sample's image overwritten, and that sample's row and key."""
    shards = tmp_path / "shards"
    shutil.copytree(corpus.shards, shards)
    shard = next(shard for shard in corpus.manifest.shards if shard.split == "train")
    entries = pq.read_table(shards / shard.index_path).to_pylist()
    row = next(row for row, entry in enumerate(entries) if len(entry["offsets"]) > 1)
    entry = entries[row]
    with (shards / shard.path).open("r+b") as file:
        file.seek(entry["offsets"][0])
        file.write(b"\x00" * entry["lengths"][0])
    return shards, row, entry["key"]


def test_a_sample_that_cannot_be_read_is_masked_never_replaced(make_loader, costs, damaged):
    shards, row, key = damaged
    whole, broken = take(make_loader(), 7), take(loader := make_loader(shards=shards), 7)
    assert [batch.masked_keys for batch in broken if batch.masked_keys] == [(key,)]
    assert loader.state_dict().masked_keys == (key,)
    for expected, found in zip(whole, broken, strict=True):
        np.testing.assert_array_equal(expected.rows, found.rows)
        lost = row in found.rows
        assert found.num_rows == expected.num_rows - lost
        missing = costs.num_label_tokens[row] if lost else 0
        assert found.num_label_tokens == expected.num_label_tokens - missing
        for index, micro_batch in enumerate(found.micro_batches):
            assert same(micro_batch, expected.micro_batches[index]) != (row in found.rows[index])


def test_a_masked_sample_stays_masked_after_a_resume(make_loader, damaged):
    _, row, key = damaged
    state = LoaderState(masked_keys=(key,))
    batches = take(loader := make_loader(state=state), 7)
    masked = [batch for batch in batches if batch.masked_keys]
    assert [batch.masked_keys for batch in masked] == [(key,)]
    assert row in masked[0].rows
    assert loader.state_dict().masked_keys == (key,)


def test_a_state_of_another_schedule_is_refused(make_loader):
    state = make_loader(spec=SPEC.model_copy(update={"seed": 1})).schedule.sha256
    with pytest.raises(FormatError, match=r"loader's state belong to the schedule"):
        make_loader(state=LoaderState(step=3, schedule_sha256=state))


def test_costs_of_other_data_or_processor_are_refused(make_loader, corpus, tmp_path):
    other = corpus.manifest.model_copy(update={"num_quarantined": 99})
    with pytest.raises(FormatError, match="sample costs belong to the shards"):
        make_loader(manifest=other)
    processor = tmp_path / "processor"
    shutil.copytree(corpus.processor, processor)
    info = (processor / "processor.json").read_text()
    sha256 = info.split('"sha256": "')[1][:64]
    (processor / "processor.json").write_text(info.replace(sha256, "0" * 64))
    with pytest.raises(FormatError, match="sample costs belong to the processor"):
        make_loader(processor=processor)


def test_a_micro_batch_that_does_not_fit_is_refused_at_once(make_loader):
    with pytest.raises(ConfigError, match="3 rows splits groups of 4"):
        make_loader(micro_batch=3)


def heldout(corpus, **options):
    settings = {"max_samples": 100, "micro_batch": 4, "rank": 0, "world_size": 1, **options}
    return heldout_batches(
        shards=corpus.shards,
        manifest=corpus.manifest,
        costs=corpus.sample_costs,
        processor=corpus.processor,
        **settings,
    )


@pytest.mark.parametrize(("world_size", "micro_batch"), [(1, 4), (2, 4), (3, 5), (4, 8)])
def test_heldout_samples_are_shared_once(corpus, world_size, micro_batch):
    expected = load_costs(corpus.sample_costs, manifest=corpus.manifest, split="heldout")
    ranks = [
        heldout(corpus, world_size=world_size, rank=rank, micro_batch=micro_batch)
        for rank in range(world_size)
    ]
    assert len({len(batches) for batches in ranks}) == 1
    batches = [batch for part in ranks for batch in part]
    assert sum(batch.num_rows for batch in batches) == expected.num_samples == 24
    assert sum(batch.num_label_tokens for batch in batches) == expected.num_label_tokens.sum()
    assert sum(batch.num_image_tokens for batch in batches) == expected.num_image_tokens.sum()


def test_heldout_batches_are_fixed_and_bounded(corpus):
    one, other = heldout(corpus, max_samples=7), heldout(corpus, max_samples=7)
    assert sum(batch.num_rows for batch in one) == 7
    assert all(same(*pair) for pair in zip(one, other, strict=True))
    assert heldout(corpus, max_samples=0) == []


def test_the_loader_leaves_the_ranks_random_numbers_alone(make_loader):
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    take(make_loader(), 2)
    assert torch.equal(torch.rand(4), expected)
