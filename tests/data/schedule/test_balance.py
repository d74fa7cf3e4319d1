from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.data.schedule.balance import arrange
from diptych.data.schedule.draws import Draws


def arranged(costs, *, first=0, per_batch, balance_steps):
    return arrange(
        np.asarray(costs, float),
        first=first,
        per_batch=per_batch,
        balance_steps=balance_steps,
        draws=Draws(0),
    )


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 60), st.integers(0, 30), st.integers(1, 9), st.integers(1, 5))
def test_each_unit_is_placed_once(num_units, first, per_batch, balance_steps):
    costs = np.random.default_rng(0).random(num_units)
    order = arranged(costs, first=first, per_batch=per_batch, balance_steps=balance_steps)
    assert sorted(order.tolist()) == list(range(num_units))


def test_a_batch_has_units_of_near_cost():
    costs = np.random.default_rng(0).permutation(40)
    batches = costs[arranged(costs, per_batch=4, balance_steps=10)].reshape(10, 4)
    assert {tuple(sorted(batch)) for batch in batches.tolist()} == {
        tuple(range(first, first + 4)) for first in range(0, 40, 4)
    }
    assert batches[:, 0].tolist() != sorted(batches[:, 0].tolist()), "batches come in any order"


def test_shared_batches_take_middling_units():
    """Of 2 + 4 + 4 + 2 units, those at the ends lie in batches shared with other windows."""
    costs = np.random.default_rng(0).permutation(12)
    placed = costs[arranged(costs, first=2, per_batch=4, balance_steps=4)]
    assert sorted([*placed[:2], *placed[-2:]]) == [4, 5, 6, 7]
    assert sorted(map(sorted, placed[2:10].reshape(2, 4).tolist())) == [
        [0, 1, 2, 3],
        [8, 9, 10, 11],
    ]


def test_one_balance_step_leaves_batches_mixed():
    costs = np.sort(np.random.default_rng(0).random(4_000))
    means = costs[arranged(costs, per_batch=8, balance_steps=1)].reshape(-1, 8).mean(axis=1)
    # The spread of means of eight at random.
    assert abs(means.std() / (costs.std() / np.sqrt(8)) - 1) < 0.1
