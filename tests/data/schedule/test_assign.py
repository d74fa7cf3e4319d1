from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.core.errors import ConfigError
from diptych.core.records import ScheduleSpec
from diptych.data.schedule.assign import assign
from diptych.data.schedule.ragged import pack_rows
from diptych.data.schedule.schedule import Schedule
from tests.data.synthetic import BUCKETS, make_costs

SIZES = [(1, 8), (2, 8), (4, 8), (8, 8), (16, 8), (32, 8), (3, 3), (1, 1), (4, 2), (5, 1)]


def make_rows(counts):
    """Rows of so many samples each, numbered through."""
    ends = np.cumsum(counts)
    return pack_rows([np.arange(end - n, end) for n, end in zip(counts, ends, strict=True)])


def deal(rows, *, world_size, **options):
    return [assign(rows, world_size=world_size, rank=rank, **options) for rank in range(world_size)]


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(SIZES),
    st.integers(1, 9),
    st.integers(1, 6),
    st.integers(0, 9),
    st.integers(0, 100),
)
def test_ranks_share_exactly_the_batch(sizes, world_size, num_groups, num_missing, seed):
    micro_batch, group = sizes
    rng = np.random.default_rng(seed)
    counts = rng.integers(1, 4, num_groups * group)
    counts[len(counts) - min(num_missing, len(counts) - 1) :] = 0
    rows = make_rows(counts)
    costs = rng.lognormal(0, 1, len(rows)) * (counts > 0)
    dealt = deal(rows, world_size=world_size, costs=costs, micro_batch=micro_batch, group=group)
    assert len({len(hand) for hand in dealt}) == 1, "every rank has as many micro-batches"
    assert {len(batch) for hand in dealt for batch in hand} == {micro_batch}
    seen = Counter(tuple(row) for hand in dealt for batch in hand for row in batch if len(row))
    assert seen == Counter(tuple(row) for row in rows if len(row))


@settings(max_examples=50, deadline=None)
@given(st.sampled_from([1, 2, 4, 8]), st.integers(1, 5))
def test_a_micro_batch_is_of_one_group(micro_batch, world_size):
    rows = make_rows([1] * 32)
    dealt = deal(rows, world_size=world_size, costs=np.ones(32), micro_batch=micro_batch, group=8)
    for hand in dealt:
        for batch in hand:
            assert len({sample // 8 for sample in batch.samples.tolist()}) <= 1


def test_the_costliest_go_to_the_least_loaded():
    # By hand: 9 -> rank 0, 7 -> rank 1, 6 -> rank 1 (7 < 9), 5 -> rank 0 (9 < 13; rank 1 is full).
    costs = np.array([5.0, 9.0, 7.0, 6.0])
    dealt = deal(make_rows([1] * 4), world_size=2, costs=costs, micro_batch=1, group=1)
    assert [[batch.samples.tolist() for batch in hand] for hand in dealt] == [
        [[1], [0]],
        [[2], [3]],
    ]


@pytest.mark.parametrize("mode", ["bucket", "pack"])
def test_ranks_carry_the_same(mode):
    costs = make_costs(8_000, num_shards=16)
    spec = ScheduleSpec(mode=mode, global_batch=64, group=4, max_row_tokens=1024)
    schedule = Schedule(costs, buckets=BUCKETS, spec=spec)
    idle, weights = [], []
    for number in range(schedule.num_steps(0) - 1):
        rows = schedule.rows(0, number)
        row_costs = schedule.weigh(rows)
        weights.append(row_costs)
        options = {"costs": row_costs, "micro_batch": 4, "group": schedule.group}
        dealt = deal(rows, world_size=8, **options)
        loads = [sum(schedule.weigh(batch).sum() for batch in hand) for hand in dealt]
        idle.append(1 - np.mean(loads) / max(loads))
    random = np.random.default_rng(0).permutation(np.concatenate(weights))
    loads = random.reshape(-1, 8, 8).sum(axis=2)
    random_idle = (1 - loads.mean(axis=1) / loads.max(axis=1)).mean()
    assert np.mean(idle) < random_idle / 5


def test_a_micro_batch_that_splits_groups_is_refused():
    with pytest.raises(ConfigError, match=r"3 rows splits groups of 8.*1, 2, 4, 8, or a multiple"):
        assign(make_rows([1] * 8), costs=np.ones(8), world_size=1, rank=0, micro_batch=3, group=8)
