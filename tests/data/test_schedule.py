from __future__ import annotations

import hashlib
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.core.errors import ConfigError, DataError
from diptych.core.records import Buckets, ScheduleSpec
from diptych.data.bucket import bucket_of
from diptych.data.schedule import Schedule, measure_rows
from tests.data.synthetic import BUCKETS, make_costs


def make_schedule(num_samples, *, num_shards=4, data_seed=0, **spec):
    costs = make_costs(num_samples, num_shards=num_shards, seed=data_seed)
    return Schedule(costs, buckets=BUCKETS, spec=ScheduleSpec(**spec))


@st.composite
def schedules(draw):
    group = draw(st.integers(1, 6))
    return make_schedule(
        draw(st.integers(1, 400)),
        num_shards=draw(st.integers(1, 9)),
        data_seed=draw(st.integers(0, 5)),
        group=group,
        global_batch=group * draw(st.integers(1, 5)),
        window_shards=draw(st.integers(1, 5)),
        seed=draw(st.integers(-3, 2**40)),
    )


@settings(max_examples=150, deadline=None)
@given(schedules(), st.integers(0, 5))
def test_each_sample_is_seen_once_an_epoch(schedule, epoch):
    rows = schedule.rows(epoch)
    assert rows.shape == (schedule.num_steps(epoch), schedule.spec.global_batch)
    assert Counter(rows[rows >= 0].tolist()) == Counter(range(schedule.costs.num_samples))
    missing = np.flatnonzero(rows.reshape(-1) < 0)
    first_missing = schedule.costs.num_samples
    assert missing.tolist() == list(range(first_missing, rows.size)), "-1 only at the very end"
    assert len(missing) < schedule.spec.global_batch


@settings(max_examples=100, deadline=None)
@given(schedules(), st.integers(0, 3))
def test_groups_have_one_bucket_but_for_the_leftovers(schedule, epoch):
    costs, spec = schedule.costs, schedule.spec
    buckets = bucket_of(BUCKETS, area_px=costs.area_px, aspect=costs.aspect)
    groups = schedule.rows(epoch).reshape(-1, spec.group)
    mixed = [len(np.unique(buckets[group[group >= 0]])) > 1 for group in groups]
    # What a window can leave over: less than a group a bucket, less than a batch of groups.
    num_windows = -(-(len(costs.shard_starts) - 1) // spec.window_shards)
    left_by_window = 7 * (spec.group - 1) + spec.global_batch - spec.group
    num_last_steps = -(-num_windows * left_by_window // spec.global_batch)
    first_mixed = int(np.argmax(mixed)) if any(mixed) else len(groups)
    steps_from_first_mixed = schedule.num_steps(epoch) - first_mixed * spec.group // (
        spec.global_batch
    )
    assert steps_from_first_mixed <= num_last_steps


@given(schedules(), st.integers(0, 10_000))
@settings(max_examples=50, deadline=None)
def test_a_step_is_found_by_division(schedule, step):
    epoch, number = schedule.locate(step)
    assert sum(schedule.num_steps(before) for before in range(epoch)) + number == step
    assert 0 <= number < schedule.num_steps(epoch)


def test_it_depends_on_nothing_but_its_arguments():
    one, other = make_schedule(300), make_schedule(300)
    expected = [one.rows(epoch) for epoch in (0, 1, 2)]
    for epoch in (2, 0, 1):
        np.testing.assert_array_equal(other.rows(epoch), expected[epoch])
    assert not np.array_equal(expected[0], expected[1])
    assert not np.array_equal(expected[0], make_schedule(300, seed=1).rows(0))
    with pytest.raises(ValueError, match="read-only"):
        expected[0][0, 0] = 7


def test_an_epoch_is_frozen():
    """A change of these numbers changes the meaning of every saved loader state."""
    numbers = np.arange(500)
    costs = make_costs(
        500,
        num_tokens=(10 + numbers * 37 % 101).astype(np.int32),
        num_patches=(numbers * 11 % 7 * 4).astype(np.int32),
        area_px=numbers * 11 % 7 * 900,
        aspect=(0.5 + numbers % 3).astype(np.float32),
        shard_starts=np.array([0, 70, 150, 151, 300, 300, 440, 500]),
    )
    spec = ScheduleSpec(group=4, global_batch=16, window_shards=3)
    rows = Schedule(costs, buckets=BUCKETS, spec=spec).rows(3)
    digest = hashlib.sha256(rows.astype("<i8").tobytes()).hexdigest()
    assert digest == "a035c6509b52db445d4cd00cf15bcff7e7cd7015946d13e92555f00f0deac4e5"


def test_windows_do_not_know_each_other():
    """Swapping the samples of a shard in one window leaves the other windows' full batches."""
    spec = ScheduleSpec(group=2, global_batch=4, window_shards=1, square_weight=0, patch_weight=0)
    costs = make_costs(80, num_shards=2)
    starts = np.array([0, 40, 80])
    tokens = costs.num_tokens.copy()
    # The same values in another order, so that means over the split stay.
    tokens[:40] = tokens[:40][::-1]
    columns = {"num_patches": costs.num_patches, "area_px": costs.area_px, "aspect": costs.aspect}
    before = Schedule(
        make_costs(80, shard_starts=starts, num_tokens=costs.num_tokens, **columns),
        buckets=BUCKETS,
        spec=spec,
    ).rows(0)
    after = Schedule(
        make_costs(80, shard_starts=starts, num_tokens=tokens, **columns),
        buckets=BUCKETS,
        spec=spec,
    ).rows(0)
    whole = [[tuple(batch) for batch in rows if (batch >= 40).all()] for rows in (before, after)]
    assert len(whole[0]) >= 5
    assert whole[0] == whole[1]
    assert not np.array_equal(before, after)


def padding(lengths, rows, *, group):
    """Padding over places, from lengths alone."""
    padded = np.where(rows < 0, 0, lengths[rows]).reshape(-1, group)
    return 1 - padded.sum() / (padded.max(axis=1) * group).sum()


def test_padding_is_at_most_a_third_of_random_batching():
    schedule = make_schedule(8_000, num_shards=16, group=4, global_batch=32)
    lengths = schedule.costs.num_tokens
    ours = padding(lengths, schedule.rows(0), group=4)
    random = padding(lengths, np.random.default_rng(0).permutation(8_000), group=4)
    assert random > 0.2
    assert ours <= random / 3


def test_groups_of_a_batch_cost_the_same():
    schedule = make_schedule(8_000, num_shards=16, group=4, global_batch=32)

    def spread(rows):
        costs = schedule.row_costs[rows].reshape(-1, 8, 4).sum(axis=2)
        return (costs.max(axis=1) / costs.mean(axis=1) - 1).mean()

    random = spread(np.random.default_rng(0).permutation(8_000))
    assert spread(schedule.rows(0)) <= random / 4


def test_batches_come_in_no_order_of_cost():
    schedule = make_schedule(8_000, num_shards=16, group=4, global_batch=32)
    rows = schedule.rows(0)
    costs = np.where(rows < 0, 0, schedule.row_costs[rows]).sum(axis=1)[:-1]
    assert abs(np.corrcoef(np.arange(len(costs)), costs)[0, 1]) < 0.25
    assert abs(np.corrcoef(costs[:-1], costs[1:])[0, 1]) < 0.25


def test_groups_differ_from_epoch_to_epoch():
    schedule = make_schedule(800, group=4, global_batch=8)
    groups = [
        {frozenset(group) for group in schedule.rows(epoch).reshape(-1, 4).tolist()}
        for epoch in (0, 1)
    ]
    assert len(groups[0] & groups[1]) < 0.2 * len(groups[0])


def test_a_rows_cost_is_in_means():
    costs = make_costs(
        3,
        num_tokens=np.array([10, 20, 30], np.int32),
        num_patches=np.array([0, 8, 4], np.int32),
    )
    spec = ScheduleSpec(token_weight=0.5, square_weight=0.25, patch_weight=0.25)
    # Means: 20 tokens, 1400 / 3 squared tokens, 4 patches.
    by_hand = [
        0.5 * 10 / 20 + 0.25 * 100 / (1400 / 3),
        0.5 * 20 / 20 + 0.25 * 400 / (1400 / 3) + 0.25 * 8 / 4,
        0.5 * 30 / 20 + 0.25 * 900 / (1400 / 3) + 0.25 * 4 / 4,
    ]
    np.testing.assert_allclose(measure_rows(costs, spec=spec), by_hand)


def test_a_rows_cost_without_any_image():
    costs = make_costs(
        2, num_tokens=np.array([10, 30], np.int32), num_patches=np.zeros(2, np.int32)
    )
    spec = ScheduleSpec(token_weight=1, square_weight=0, patch_weight=1)
    np.testing.assert_allclose(measure_rows(costs, spec=spec), [0.5, 1.5])


def test_the_hash_names_everything_that_decides():
    costs = make_costs(50)
    spec = ScheduleSpec()
    base = Schedule(costs, buckets=BUCKETS, spec=spec).sha256
    assert base == Schedule(make_costs(50), buckets=BUCKETS, spec=ScheduleSpec()).sha256
    others = [
        Schedule(costs, buckets=Buckets(areas_px=(9,), aspects=()), spec=spec),
        Schedule(make_costs(50, manifest_sha256="n"), buckets=BUCKETS, spec=spec),
        Schedule(make_costs(50, processor_sha256="q"), buckets=BUCKETS, spec=spec),
        *(
            Schedule(costs, buckets=BUCKETS, spec=spec.model_copy(update=change))
            for change in (
                {"seed": 1},
                {"group": 4},
                {"global_batch": 64},
                {"window_shards": 2},
                {"patch_weight": 0.5},
            )
        ),
    ]
    assert len({base, *(other.sha256 for other in others)}) == 1 + len(others)


def test_a_batch_that_groups_do_not_fill_is_refused():
    with pytest.raises(
        ConfigError, match=r"30 rows.*groups of 8.*multiple.*Set global_batch to 32"
    ):
        make_schedule(50, global_batch=30, group=8)


def test_a_row_that_is_too_long_is_refused():
    costs = make_costs(3, num_tokens=np.array([10, 900, 1025], np.int32))
    with pytest.raises(DataError, match=r"1 samples are longer than 1024.*1025.*never cut"):
        Schedule(costs, buckets=BUCKETS, spec=ScheduleSpec(max_row_tokens=1024))


def test_a_split_without_samples_is_refused():
    with pytest.raises(DataError, match="'train' has no sample"):
        make_schedule(0, num_shards=1)
