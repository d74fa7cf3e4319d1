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
from diptych.data.schedule.schedule import Schedule
from tests.data.synthetic import BUCKETS, make_costs

MODES = ("bucket", "pack")


def make_schedule(num_samples, *, num_shards=4, data_seed=0, sources=("toy",), **spec):
    costs = make_costs(num_samples, num_shards=num_shards, seed=data_seed, sources=sources)
    return Schedule(costs, buckets=BUCKETS, spec=ScheduleSpec(**spec))


@st.composite
def schedules(draw, modes=MODES):
    """A schedule of either mode, with an unnamed source, one in parts and one taken twice."""
    group = draw(st.integers(1, 6))
    sources = ("toy", "half", "twice")[: draw(st.integers(1, 3))]
    repeats = {"half": 0.5, "twice": 2}
    return make_schedule(
        draw(st.integers(1, 400)),
        num_shards=draw(st.integers(1, 9)),
        data_seed=draw(st.integers(0, 5)),
        sources=sources,
        repeats={source: repeats[source] for source in sources[1:]},
        mode=draw(st.sampled_from(modes)),
        group=group,
        global_batch=group * draw(st.integers(1, 5)),
        window_shards=draw(st.integers(1, 5)),
        balance_steps=draw(st.sampled_from([1, 3, 16])),
        max_row_tokens=2048,
        max_row_patches=draw(st.sampled_from([None, 160, 1000])),
        seed=draw(st.integers(-3, 2**40)),
    )


def batches_of(schedule, epoch=0):
    return [schedule.rows(epoch, number) for number in range(schedule.num_steps(epoch))]


def samples_of(schedule, epoch=0):
    return np.concatenate([rows.samples for rows in batches_of(schedule, epoch)])


@settings(max_examples=100, deadline=None)
@given(schedules(), st.integers(0, 5))
def test_each_sample_is_seen_as_often_as_its_source_says(schedule, epoch):
    costs, seen = schedule.costs, Counter(samples_of(schedule, epoch).tolist())
    shards = np.searchsorted(costs.shard_starts, np.arange(costs.num_samples), side="right") - 1
    source_of = costs.shard_sources[shards]
    times = np.array([seen[sample] for sample in range(costs.num_samples)])
    assert (times[source_of == 0] == 1).all()
    assert (times[source_of == 2] == 2).all()
    half = times[source_of == 1]
    assert set(half.tolist()) <= {0, 1}
    assert abs(half.sum() - len(half) / 2) <= 0.5


@settings(max_examples=80, deadline=None)
@given(schedules(), st.integers(0, 3))
def test_batches_are_full_but_for_an_epochs_last(schedule, epoch):
    num_steps = schedule.num_steps(epoch)
    for number, rows in enumerate(batches_of(schedule, epoch)):
        counts = np.diff(rows.starts)
        assert len(counts) == schedule.spec.global_batch
        num_empty = int((counts == 0).sum())
        assert (counts[: len(counts) - num_empty] > 0).all(), "empty rows come last"
        assert num_empty == 0 or number == num_steps - 1
        assert num_empty < len(counts)
        assert schedule.is_last(epoch, number) == (number == num_steps - 1)
    with pytest.raises(AssertionError, match="has no step"):
        schedule.rows(epoch, num_steps)


@settings(max_examples=80, deadline=None)
@given(schedules())
def test_rows_keep_their_budgets(schedule):
    spec = schedule.spec
    for rows in batches_of(schedule):
        for row in rows:
            costs = schedule.costs.take(row)
            assert costs.num_tokens.sum() <= spec.max_row_tokens
            assert spec.max_row_patches is None or costs.num_patches.sum() <= spec.max_row_patches
            assert spec.mode == "pack" or len(row) <= 1


@settings(max_examples=100, deadline=None)
@given(schedules(modes=("bucket",)), st.integers(0, 3))
def test_few_groups_mix_buckets(schedule, epoch):
    costs, spec = schedule.costs, schedule.spec
    buckets = costs.column("area_px"), costs.column("aspect")
    buckets = bucket_of(BUCKETS, area_px=buckets[0], aspect=buckets[1])
    groups = samples_of(schedule, epoch)
    groups = np.split(groups, range(spec.group, len(groups), spec.group))
    num_mixed = sum(len(np.unique(buckets[group])) > 1 for group in groups)
    # A window and the tail leave over less than a group of each of the 7 buckets.
    num_windows = -(-3 * 9 // spec.window_shards)
    num_left = (num_windows + 1) * 7 * (spec.group - 1)
    assert num_mixed <= -(-num_left // spec.group) + 1


@settings(max_examples=60, deadline=None)
@given(schedules(), st.integers(0, 3), st.randoms(use_true_random=False))
def test_steps_drawn_in_any_order_are_the_same(schedule, epoch, random):
    expected = [rows.samples.tolist() for rows in batches_of(schedule, epoch)]
    again = Schedule(schedule.costs, buckets=BUCKETS, spec=schedule.spec)
    numbers = list(range(len(expected)))
    random.shuffle(numbers)
    for number in numbers:
        assert again.rows(epoch, number).samples.tolist() == expected[number]
        again.rows(random.randint(0, 5), 0)


@pytest.mark.parametrize("mode", MODES)
def test_what_windows_leave_over_is_all_that_is_kept(mode):
    """A view of a window's samples would keep the whole window, and so the whole epoch."""
    schedule = make_schedule(3_001, num_shards=30, mode=mode, window_shards=3, max_row_tokens=512)
    samples_of(schedule)
    left = schedule._epoch(0).left
    assert len(left) == 10
    assert all(samples.base is None for samples in left.values())


@pytest.mark.parametrize("mode", MODES)
def test_epochs_and_seeds_differ(mode):
    one, other = (make_schedule(300, mode=mode, seed=seed) for seed in (0, 1))
    assert samples_of(one, 0).tolist() != samples_of(one, 1).tolist()
    assert samples_of(one, 0).tolist() != samples_of(other, 0).tolist()


class Counting:
    """Notes which shards of some costs are asked for."""

    def __init__(self, costs):
        self.read = set()
        self._shard = costs.shard
        costs.shard = self.shard

    def shard(self, number):
        self.read.add(number)
        return self._shard(number)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("first", [0, 20])
def test_no_step_waits_for_the_whole_epoch(mode, first):
    """Asked step after step whether an epoch ends, from any step on, few windows are drawn each."""
    costs = make_costs(6_000, shard_starts=np.arange(0, 6_001, 100))
    spec = ScheduleSpec(mode=mode, global_batch=8, window_shards=3, max_row_tokens=1024)
    schedule = Schedule(costs, buckets=BUCKETS, spec=spec)
    schedule.rows(1, 0)
    counting, number, most = Counting(costs), first, 0
    while not schedule.is_last(0, number):
        most = max(most, len(counting.read))
        counting.read.clear()
        number += 1
    assert number + 1 == schedule.num_steps(0)
    assert 0 < most <= 2 * 3
    counting.read.clear()
    schedule.num_steps(0)
    assert not counting.read


@pytest.mark.parametrize("mode", MODES)
def test_a_step_reads_the_shards_of_its_windows_alone(mode):
    starts = np.arange(0, 6_001, 100)
    costs = make_costs(6_000, shard_starts=starts)
    spec = ScheduleSpec(mode=mode, global_batch=8, window_shards=3)
    schedule = Schedule(costs, buckets=BUCKETS, spec=spec)
    schedule.rows(1, 0)
    counting = Counting(costs)
    number = schedule.num_steps(0) // 2 if mode == "bucket" else 15
    schedule.rows(0, number)
    assert not schedule.is_last(0, number)
    assert len(counting.read) <= 2 * 3
    schedule.num_steps(0)
    assert (len(counting.read) == 60) == (mode == "pack")


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("bucket", "2f3dc0bcdd8799ee4679dd2d293e664ef82d570b9a87f27be02c13d97431a179"),
        ("pack", "adffc4fbd203572af8e3a15f1c5089366d9aef7e63cc97efd9f3930de9beeeb6"),
    ],
)
def test_an_epoch_is_frozen(mode, expected):
    """A change of these digests changes the meaning of every saved loader state."""
    numbers = np.arange(500)
    costs = make_costs(
        500,
        num_tokens=(10 + numbers * 37 % 101).astype(np.int32),
        num_patches=(numbers * 11 % 7 * 4).astype(np.int32),
        area_px=numbers * 11 % 7 * 900,
        aspect=(0.5 + numbers % 3).astype(np.float32),
        shard_starts=[0, 70, 150, 151, 300, 300, 440, 500],
    )
    spec = ScheduleSpec(mode=mode, group=4, global_batch=16, window_shards=3, max_row_tokens=256)
    batches = batches_of(Schedule(costs, buckets=BUCKETS, spec=spec), 3)
    text = repr([[row.tolist() for row in rows] for rows in batches])
    assert hashlib.sha256(text.encode()).hexdigest() == expected


def padding(lengths, rows, *, group):
    """Padding over places, from lengths alone."""
    padded = np.where(rows < 0, 0, lengths[rows]).reshape(-1, group)
    return 1 - padded.sum() / (padded.max(axis=1) * group).sum()


def test_padding_is_at_most_a_third_of_random_batching():
    schedule = make_schedule(8_000, num_shards=16, group=4, global_batch=32)
    lengths = schedule.costs.column("num_tokens")
    ours = padding(lengths, samples_of(schedule), group=4)
    random = padding(lengths, np.random.default_rng(0).permutation(8_000), group=4)
    assert random > 0.2
    assert ours <= random / 3


def test_packed_rows_waste_little():
    schedule = make_schedule(8_000, num_shards=40, mode="pack", max_row_tokens=1024)
    num_rows = sum(int((np.diff(rows.starts) > 0).sum()) for rows in batches_of(schedule))
    assert 1 - schedule.costs.totals.num_tokens / (1024 * num_rows) < 0.01


def spread(batches):
    """How far the costliest of a batch is above the mean, on average."""
    return np.mean([costs.max() / costs.mean() - 1 for costs in batches])


def test_groups_of_a_batch_cost_the_same():
    schedule = make_schedule(8_000, num_shards=16, group=4, global_batch=32)
    batches = batches_of(schedule)
    costs = [schedule.weigh(rows).reshape(8, 4).sum(axis=1) for rows in batches]
    everything = np.concatenate([schedule.weigh(rows) for rows in batches])
    random = np.random.default_rng(0).permutation(everything).reshape(-1, 8, 4).sum(axis=2)
    assert spread(costs) <= spread(random) / 4


def test_packed_rows_of_a_batch_cost_the_same():
    """Near the end of an epoch rows are fewer; there one batch may hold what is odd."""
    schedule = make_schedule(
        8_000, num_shards=16, mode="pack", global_batch=8, max_row_tokens=1024, square_weight=1
    )
    costs = [schedule.weigh(rows) for rows in batches_of(schedule)[:-1]]
    random = np.random.default_rng(0).permutation(np.concatenate(costs)).reshape(-1, 8)
    assert spread(costs) <= spread(random) / 4


@pytest.mark.parametrize("mode", MODES)
def test_batches_come_in_no_order_of_cost(mode):
    schedule = make_schedule(8_000, num_shards=16, mode=mode, group=4, global_batch=32)
    costs = np.array([schedule.weigh(rows).sum() for rows in batches_of(schedule)[:-1]])
    assert abs(np.corrcoef(np.arange(len(costs)), costs)[0, 1]) < 0.3
    assert abs(np.corrcoef(costs[:-1], costs[1:])[0, 1]) < 0.3


@pytest.mark.parametrize("mode", MODES)
def test_rows_that_meet_differ_from_epoch_to_epoch(mode):
    schedule = make_schedule(800, mode=mode, group=4, global_batch=8, max_row_tokens=256)
    met = []
    for epoch in (0, 1):
        rows = [row for rows in batches_of(schedule, epoch) for row in rows]
        if mode == "bucket":
            rows = np.split(np.concatenate(rows), 200)
        met.append({frozenset(row.tolist()) for row in rows if len(row) > 1})
    assert len(met[0] & met[1]) < 0.2 * len(met[0])


def test_a_rows_cost_is_in_means():
    costs = make_costs(
        3,
        num_tokens=np.array([10, 20, 30], np.int32),
        num_patches=np.array([0, 8, 4], np.int32),
        shard_starts=[0, 3],
    )
    spec = ScheduleSpec(mode="pack", global_batch=2, max_row_tokens=40, max_row_patches=8)
    schedule = Schedule(costs, buckets=BUCKETS, spec=spec)
    rows = schedule.rows(0, 0)
    # Means: 20 tokens, 1400 / 3 squared tokens, 4 patches.
    by_hand = {
        (0, 2): 0.5 * 40 / 20 + 0.25 * (100 + 900) / (1400 / 3) + 0.25 * 4 / 4,
        (1,): 0.5 * 20 / 20 + 0.25 * 400 / (1400 / 3) + 0.25 * 8 / 4,
    }
    found = {tuple(sorted(row)): cost for row, cost in zip(rows, schedule.weigh(rows), strict=True)}
    assert found == pytest.approx(by_hand)


def test_a_rows_cost_without_any_image():
    costs = make_costs(
        2,
        num_tokens=np.array([10, 30], np.int32),
        num_patches=np.zeros(2, np.int32),
        shard_starts=[0, 2],
    )
    spec = ScheduleSpec(global_batch=4, group=2, token_weight=1, square_weight=0, patch_weight=1)
    schedule = Schedule(costs, buckets=BUCKETS, spec=spec)
    weighed = schedule.weigh(schedule.rows(0, 0))
    assert sorted(weighed) == [0, 0, 0.5, 1.5], "empty rows cost nothing"


@pytest.mark.parametrize("mode", MODES)
def test_the_tail_costs_what_it_costs(mode):
    """Costs of the tail's samples are kept; they must be those of the shards."""
    schedule = make_schedule(
        403, num_shards=9, mode=mode, window_shards=1, group=8, max_row_tokens=512
    )
    batches = batches_of(schedule)
    fresh = Schedule(schedule.costs, buckets=BUCKETS, spec=schedule.spec)
    for rows in batches:
        np.testing.assert_array_equal(schedule.weigh(rows), fresh.weigh(rows))


def test_the_hash_names_everything_that_decides():
    costs = make_costs(50)
    spec = ScheduleSpec()
    base = Schedule(costs, buckets=BUCKETS, spec=spec).sha256
    assert base == Schedule(make_costs(50), buckets=BUCKETS, spec=ScheduleSpec()).sha256
    hashes = [{"manifest_sha256": "n"}, {"processor_sha256": "q"}, {"split": "heldout"}]
    others = [
        Schedule(costs, buckets=Buckets(areas_px=(9,), aspects=()), spec=spec),
        *(Schedule(make_costs(50, names=n), buckets=BUCKETS, spec=spec) for n in hashes),
        *(
            Schedule(costs, buckets=BUCKETS, spec=spec.model_copy(update=change))
            for change in (
                {"mode": "pack"},
                {"seed": 1},
                {"group": 4},
                {"global_batch": 64},
                {"window_shards": 2},
                {"patch_weight": 0.5},
                {"max_row_patches": 4_000},
                {"over_long": "leave_out"},
                {"repeats": {"toy": 2}},
                {"weights": {"toy": 2}},
            )
        ),
    ]
    assert len({base, *(other.sha256 for other in others)}) == 1 + len(others)


def test_a_batch_that_groups_do_not_fill_is_refused():
    with pytest.raises(
        ConfigError, match=r"30 rows.*groups of 8.*multiple.*Set global_batch to 32"
    ):
        make_schedule(50, global_batch=30, group=8)
    packed = make_schedule(50, mode="pack", global_batch=30, group=8)
    assert (packed.group, make_schedule(50, group=8).group) == (1, 8)


def test_a_sample_that_is_too_long_is_refused():
    tokens = np.array([10, 900, 1025], np.int32)
    costs = make_costs(3, num_tokens=tokens, num_patches=np.array([4, 8, 0], np.int32))
    with pytest.raises(
        DataError, match=r"1 samples.*row of 1024 tokens.*1025.*never cut.*max_row_tokens.*leave"
    ):
        Schedule(costs, buckets=BUCKETS, spec=ScheduleSpec(max_row_tokens=1024))
    spec = ScheduleSpec(max_row_tokens=2048, max_row_patches=7)
    with pytest.raises(DataError, match=r"1 samples.*row of 7 patches.*has 8.*max_row_patches"):
        Schedule(costs, buckets=BUCKETS, spec=spec)


@pytest.mark.parametrize("mode", MODES)
def test_samples_that_no_batch_can_take_are_left_out_and_counted(mode):
    tokens = np.arange(1, 61, dtype=np.int32) * 10
    patches = np.where(np.arange(60) == 5, 80, 4).astype(np.int32)
    status = ["ok"] * 60
    status[3], status[7], status[58] = "no_label", "special_token", "special_token"
    costs = make_costs(60, num_shards=5, num_tokens=tokens, num_patches=patches, status=status)
    spec = ScheduleSpec(
        mode=mode, max_row_tokens=500, max_row_patches=40, over_long="leave_out", global_batch=8
    )
    schedule = Schedule(costs, buckets=BUCKETS, spec=spec)
    assert schedule.num_left_out == {"no_label": 1, "special_token": 2, "over_long": 10}
    taken = sorted(set(range(50)) - {3, 5, 7})
    assert sorted(samples_of(schedule).tolist()) == taken


def test_a_split_without_samples_is_refused():
    with pytest.raises(DataError, match="'train' has no sample"):
        make_schedule(0, num_shards=1)
    costs = make_costs(3, status=["no_label", "no_label", "unencodable"])
    with pytest.raises(DataError, match=r"no sample that a batch.*2 no_label, 1 unencodable"):
        Schedule(costs, buckets=BUCKETS, spec=ScheduleSpec())


def test_weights_decide_the_sources_shares():
    schedule = make_schedule(
        900, num_shards=9, sources=("charts", "captions"), weights={"charts": 3, "captions": 1}
    )
    samples = samples_of(schedule)
    shards = np.searchsorted(schedule.costs.shard_starts, samples, side="right") - 1
    shares = np.bincount(schedule.costs.shard_sources[shards])
    assert shares.sum() == pytest.approx(900, abs=1)
    assert shares[0] / shares.sum() == pytest.approx(0.75, abs=0.002)


def test_a_part_of_a_source_is_drawn_anew_each_epoch():
    schedule = make_schedule(400, repeats={"toy": 0.25}, group=4, global_batch=8)
    drawn = [set(samples_of(schedule, epoch).tolist()) for epoch in (0, 1)]
    assert [len(each) for each in drawn] == [100, 100]
    assert 5 < len(drawn[0] & drawn[1]) < 60
