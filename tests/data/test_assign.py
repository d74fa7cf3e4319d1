from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.core.errors import ConfigError
from diptych.core.records import ScheduleSpec
from diptych.data.assign import assign
from diptych.data.schedule import Schedule
from tests.data.synthetic import BUCKETS, make_costs

SIZES = [(1, 8), (2, 8), (4, 8), (8, 8), (16, 8), (32, 8), (3, 3), (1, 1), (4, 2)]


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
    rows = np.arange(num_groups * group)
    rows[len(rows) - min(num_missing, len(rows) - 1) :] = -1
    costs = np.random.default_rng(seed).lognormal(0, 1, len(rows))
    dealt = deal(rows, world_size=world_size, costs=costs, micro_batch=micro_batch, group=group)
    assert len({len(hand) for hand in dealt}) == 1, "every rank has as many micro-batches"
    assert {len(batch) for hand in dealt for batch in hand} == {micro_batch}
    seen = Counter(int(row) for hand in dealt for batch in hand for row in batch if row >= 0)
    assert seen == Counter(int(row) for row in rows if row >= 0)


@settings(max_examples=50, deadline=None)
@given(st.sampled_from([1, 2, 4, 8]), st.integers(1, 5))
def test_a_micro_batch_is_of_one_group(micro_batch, world_size):
    rows = np.random.default_rng(0).permutation(32)
    group_of = dict(zip(rows.tolist(), np.arange(32) // 8, strict=True))
    dealt = deal(rows, world_size=world_size, costs=np.ones(32), micro_batch=micro_batch, group=8)
    for hand in dealt:
        for batch in hand:
            assert len({group_of[row] for row in batch.tolist() if row >= 0}) <= 1


def test_the_costliest_go_to_the_least_loaded():
    # By hand: 9 -> rank 0, 7 -> rank 1, 6 -> rank 1 (7 < 9), 5 -> rank 0 (9 < 13; rank 1 is full).
    costs = np.array([5.0, 9.0, 7.0, 6.0])
    dealt = deal(np.arange(4), world_size=2, costs=costs, micro_batch=1, group=1)
    assert [[int(batch[0]) for batch in hand] for hand in dealt] == [[1, 0], [2, 3]]


def test_ranks_carry_the_same():
    costs = make_costs(8_000, num_shards=16)
    spec = ScheduleSpec(global_batch=64, group=4)
    schedule = Schedule(costs, buckets=BUCKETS, spec=spec)
    idle = []
    for rows in schedule.rows(0)[:-1]:
        dealt = deal(rows, world_size=8, costs=schedule.row_costs, micro_batch=4, group=4)
        loads = [sum(schedule.row_costs[batch].sum() for batch in hand) for hand in dealt]
        idle.append(1 - np.mean(loads) / max(loads))
    random = np.random.default_rng(0).permutation(8_000).reshape(-1, 8, 8)
    loads = schedule.row_costs[random].sum(axis=2)
    random_idle = (1 - loads.mean(axis=1) / loads.max(axis=1)).mean()
    assert random_idle > 0.1
    assert np.mean(idle) < random_idle / 5


def test_a_micro_batch_that_splits_groups_is_refused():
    with pytest.raises(ConfigError, match=r"3 rows splits groups of 8.*1, 2, 4, 8, or a multiple"):
        assign(np.arange(8), costs=np.ones(8), world_size=1, rank=0, micro_batch=3, group=8)
