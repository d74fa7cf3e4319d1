"""Promise 1, same batches; and the loader's half of promise 3, same run after a fault."""

from __future__ import annotations

import itertools
import os
import shutil
from collections import Counter
from dataclasses import fields

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data._utils.pin_memory import pin_memory

from diptych.core.errors import ConfigError, FormatError
from diptych.core.records import LoaderState, ScheduleSpec
from diptych.data import batcher
from diptych.data.batcher import Batcher
from diptych.data.collate import MicroBatch
from diptych.data.costs import load_costs
from diptych.data.files.store import Store
from diptych.data.loader import Loader, heldout_batches
from diptych.data.schedule.schedule import Schedule
from diptych.data.shards import remote

SPEC = ScheduleSpec(global_batch=12, group=4, window_shards=2)
"""80 training samples: 7 steps an epoch, the last with 4 rows of 12 missing."""

PACKS = ScheduleSpec(mode="pack", global_batch=3, window_shards=2, max_row_tokens=160)


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


def samples_of(batches):
    return sorted(n for batch in batches for rows in batch.rows for n in rows.samples.tolist())


def places_of(schedule, count):
    """(epoch, number) of the first steps, by counting each epoch's."""
    places, epoch = [], 0
    while len(places) < count:
        places += [(epoch, number) for number in range(schedule.num_steps(epoch))]
        epoch += 1
    return places[:count]


def same(one: MicroBatch, other: MicroBatch):
    for field in fields(MicroBatch):
        left, right = getattr(one, field.name), getattr(other, field.name)
        if isinstance(left, torch.Tensor | np.ndarray):
            if not np.array_equal(left, right):
                return False
        elif left != right:
            return False
    return True


def same_batches(some, others):
    return all(
        (one.step, one.epoch, one.number, one.masked_keys, one.cost)
        == (other.step, other.epoch, other.number, other.masked_keys, other.cost)
        and all(np.array_equal(*pair) for pair in zip(samples(one), samples(other), strict=True))
        and all(same(*pair) for pair in zip(one.micro_batches, other.micro_batches, strict=True))
        for one, other in zip(some, others, strict=True)
    )


def samples(batch):
    return [row for rows in batch.rows for row in rows]


@pytest.mark.parametrize("spec", [SPEC, PACKS], ids=["bucket", "pack"])
@pytest.mark.parametrize(
    ("world_size", "micro_batch"), [(1, 4), (1, 1), (1, 12), (2, 4), (2, 2), (3, 4), (4, 1), (5, 8)]
)
def test_a_step_has_the_same_samples_on_any_layout(make_loader, world_size, micro_batch, spec):
    loaders = [
        make_loader(world_size=world_size, rank=rank, micro_batch=micro_batch, spec=spec)
        for rank in range(world_size)
    ]
    ranks = [take(loader, 8) for loader in loaders]
    schedule = loaders[0].schedule
    for step, (epoch, number) in enumerate(places_of(schedule, 8)):
        expected = schedule.rows(epoch, number)
        shares = [batches[step] for batches in ranks]
        assert samples_of(shares) == sorted(expected.samples.tolist())
        assert len({len(share.micro_batches) for share in shares}) == 1
        assert {(s.step, s.epoch, s.number) for s in shares} == {(step, epoch, number)}
        assert sum(share.num_samples for share in shares) == len(expected.samples)
        assert sum(share.num_rows for share in shares) == sum(len(row) > 0 for row in expected)
        cost = sum(share.cost for share in shares)
        np.testing.assert_allclose(cost, schedule.weigh(expected).sum())


@pytest.mark.parametrize("spec", [SPEC, PACKS], ids=["bucket", "pack"])
def test_counts_are_those_of_the_costs(make_loader, costs, spec):
    loader = make_loader(spec=spec)
    batches = take(loader, loader.schedule.num_steps(0))
    for name in ("num_label_tokens", "num_image_tokens", "num_patches"):
        assert sum(getattr(batch, name) for batch in batches) == costs.column(name).sum()
    text = costs.column("num_tokens").sum() - costs.column("num_image_tokens").sum()
    assert sum(batch.num_text_tokens for batch in batches) == text
    assert sum(batch.num_samples for batch in batches) == costs.num_samples == 80
    if spec is SPEC:
        assert [batch.num_rows for batch in batches] == [12] * 6 + [8]
    for batch in batches:
        assert batch.num_slots == sum(b.input_ids_BS.numel() for b in batch.micro_batches)
        assert batch.num_samples_by_source.tolist() == [batch.num_samples]
        assert batch.num_label_tokens_by_source.tolist() == [batch.num_label_tokens]
        for micro_batch in batch.micro_batches:
            learnt = micro_batch.labels_BS[:, 1:] != -100
            assert micro_batch.num_label_tokens == learnt.sum()
            assert (micro_batch.segment_ids_BS is None) == (spec is SPEC)


@pytest.mark.parametrize("spec", [SPEC, PACKS], ids=["bucket", "pack"])
def test_nothing_is_lost_or_repeated_when_the_world_changes(make_loader, spec):
    """4 ranks to step 3, 2 ranks to 9, 4 to 13, 1 to three epochs' end: each sample thrice."""
    schedule = make_loader(spec=spec).schedule
    end = sum(schedule.num_steps(epoch) for epoch in range(3))
    state, seen = LoaderState(), []
    for world_size, until in ((4, 3), (2, 9), (4, 13), (1, end)):
        loaders = [
            make_loader(world_size=world_size, rank=rank, state=state, spec=spec)
            for rank in range(world_size)
        ]
        for loader in loaders:
            seen += take(loader, until - state.step)
        states = {loader.state_dict() for loader in loaders}
        assert len(states) == 1, "every rank is at the same place"
        state = LoaderState.model_validate_json(states.pop().model_dump_json())
        assert state.step == until
    assert (state.epoch, state.first_step) == (3, end)
    assert Counter(samples_of(seen)) == dict.fromkeys(range(80), 3)


def test_each_epoch_has_each_sample_once_in_another_order(make_loader):
    batches = take(make_loader(), 14)
    first, second = batches[:7], batches[7:]
    assert samples_of(first) == samples_of(second) == list(range(80))
    assert samples_of(first[:1]) != samples_of(second[:1])
    assert [(batch.epoch, batch.number) for batch in batches] == [
        (epoch, number) for epoch in range(2) for number in range(7)
    ]


@pytest.mark.parametrize("spec", [SPEC, PACKS], ids=["bucket", "pack"])
@pytest.mark.parametrize("start", [1, 5, 6, 7, 8])
def test_a_resumed_loader_goes_on_bitwise(make_loader, start, spec):
    through = take(make_loader(spec=spec), 10)
    loader = make_loader(spec=spec)
    take(loader, start)
    resumed = take(make_loader(state=loader.state_dict(), spec=spec), 10 - start)
    assert same_batches(through[start:], resumed)


def test_the_state_names_the_step_after_the_batch_in_hand(make_loader):
    loader = make_loader()
    assert loader.state_dict() == LoaderState()
    for number, batch in enumerate(itertools.islice(loader, 8)):
        assert batch.step == number
        state = loader.state_dict()
        epoch = (number + 1) // 7
        assert (state.step, state.epoch, state.first_step) == (number + 1, epoch, 7 * epoch)
        assert state.schedule_sha256 == loader.schedule.sha256


def test_a_state_at_an_epochs_end_goes_on_in_the_next(make_loader):
    through = take(make_loader(), 8)
    loader = make_loader(state=LoaderState(step=7))
    assert (loader.state.epoch, loader.state.first_step) == (1, 7)
    assert same_batches(through[7:], take(loader, 1))
    for step, first_step in ((8, 0), (3, 4)):
        with pytest.raises(FormatError, match="That epoch has 7 steps"):
            make_loader(state=LoaderState(step=step, first_step=first_step))


@pytest.mark.parametrize("spec", [SPEC, PACKS], ids=["bucket", "pack"])
@pytest.mark.parametrize("num_workers", [1, 2])
def test_workers_change_nothing(make_loader, num_workers, spec):
    alone = take(make_loader(state=LoaderState(step=5), spec=spec), 4)
    loader = make_loader(state=LoaderState(step=5), num_workers=num_workers, spec=spec)
    assert same_batches(alone, take(loader, 4))
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
        assert samples_of([expected]) == samples_of([found])
        lost = row in samples_of([found])
        assert found.num_rows == expected.num_rows - lost
        missing = costs.column("num_label_tokens")[row] if lost else 0
        assert found.num_label_tokens == expected.num_label_tokens - missing
        for index, micro_batch in enumerate(found.micro_batches):
            has_it = row in found.rows[index].samples
            assert same(micro_batch, expected.micro_batches[index]) != has_it


def test_a_bad_sample_is_absent_from_its_packed_row(make_loader, damaged):
    shards, sample, key = damaged
    whole = make_loader(spec=PACKS)
    num_steps = whole.schedule.num_steps(0)
    broken = take(make_loader(spec=PACKS, shards=shards), num_steps)
    for expected, found in zip(take(whole, num_steps), broken, strict=True):
        for index, rows in enumerate(found.rows):
            one, other = found.micro_batches[index], expected.micro_batches[index]
            at = [number for number, row in enumerate(rows) if sample in row]
            if not at:
                assert same(one, other)
                continue
            assert found.masked_keys == (key,)
            assert one.num_samples == other.num_samples - 1
            (row,) = at
            place = rows.row(row).tolist().index(sample) + 1
            kept = (other.segment_ids_BS[row] != place) & (other.segment_ids_BS[row] != 0)
            left = one.segment_ids_BS[row] != 0
            for name in ("input_ids_BS", "labels_BS", "source_ids_BS"):
                found_S, expected_S = getattr(one, name)[row, left], getattr(other, name)[row, kept]
                assert torch.equal(found_S, expected_S)
            assert torch.equal(
                one.position_ids_3BS[:, row, left], other.position_ids_3BS[:, row, kept]
            )


def test_a_masked_sample_stays_masked_after_a_resume(make_loader, damaged):
    _, row, key = damaged
    state = LoaderState(masked_keys=(key,))
    batches = take(loader := make_loader(state=state), 7)
    masked = [batch for batch in batches if batch.masked_keys]
    assert [batch.masked_keys for batch in masked] == [(key,)]
    assert row in samples_of(masked)
    assert loader.state_dict().masked_keys == (key,)


def test_a_state_of_another_schedule_is_refused(make_loader):
    state = make_loader(spec=SPEC.model_copy(update={"seed": 1})).schedule.sha256
    with pytest.raises(FormatError, match=r"loader's state belong to the schedule"):
        make_loader(state=LoaderState(step=3, schedule_sha256=state))


def test_costs_of_other_data_or_processor_are_refused(make_loader, corpus, tmp_path):
    other = corpus.manifest.model_copy(update={"quarantined": {"digits": {"too_long": 9}}})
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
    batcher = Batcher(
        shards=corpus.shards,
        manifest=corpus.manifest,
        processor=corpus.processor,
        split="heldout",
    )
    return heldout_batches(batcher, costs=corpus.sample_costs, **settings)


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
    for name in ("num_label_tokens", "num_image_tokens"):
        found = sum(getattr(batch, name) for batch in batches)
        assert found == expected.column(name).sum()


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


@pytest.mark.parametrize("spec", [SPEC, PACKS], ids=["bucket", "pack"])
def test_cached_images_change_nothing_and_need_no_decoding(
    make_loader, spec, tmp_path, monkeypatch
):
    plain = take(make_loader(spec=spec), 4)
    options = {"spec": spec, "image_cache": tmp_path / "cache", "image_cache_bytes": 1 << 30}
    assert same_batches(plain, take(make_loader(**options), 4))
    monkeypatch.setattr(batcher, "decode", lambda data: pytest.fail("decoded again"))
    assert same_batches(plain, take(make_loader(**options), 4))
    for path in (tmp_path / "cache").rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[:-1])
    monkeypatch.undo()
    assert same_batches(plain, take(make_loader(**options), 4))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_remote_give_the_same_batches(make_loader, corpus, monkeypatch, num_workers):
    class OverTheNetwork(Store):
        def __init__(self, url):
            assert url == "s3://bucket/shards"
            super().__init__(str(corpus.shards))

        def read_range(self, path, *, offset, length):
            with open(corpus.shards / path, "rb") as file:  # a Store of files is one thread's
                return os.pread(file.fileno(), length, offset)

    monkeypatch.setattr(remote, "Store", OverTheNetwork)
    loader = make_loader(shards="s3://bucket/shards", num_workers=num_workers)
    assert same_batches(take(make_loader(), 9), take(loader, 9))


def test_tensors_are_pinned_by_the_name_that_the_data_loader_calls(make_loader, monkeypatch):
    (batch,) = take(make_loader(), 1)
    pinned = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: pinned.append(self) or self)
    assert same_batches([pin_memory(batch)], [batch])
    assert len(pinned) == 6 * len(batch.micro_batches)
