from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.data.schedule.pack import measure_load, pack, resize
from diptych.data.schedule.ragged import pack_rows

samples = st.lists(st.tuples(st.integers(1, 20), st.integers(0, 12)), min_size=1, max_size=60)


def pack_plainly(tokens, *, patches=None, max_tokens, max_patches=None):
    tokens = np.asarray(tokens)
    patches = np.zeros_like(tokens) if patches is None else np.asarray(patches)
    return pack(
        tokens,
        num_patches=patches,
        max_tokens=max_tokens,
        max_patches=max_patches,
        jitter=np.ones(len(tokens)),
    )


def as_lists(rows):
    return [sorted(row.tolist()) for row in rows]


def test_the_longest_goes_first_into_the_fullest_row_with_room():
    # By hand, rows of 10: 7 | 6 | 4 fits beside 6 (free 4) and not 7 | 3 beside 7 | 2 opens a row.
    rows = pack_plainly([3, 7, 2, 6, 4], max_tokens=10)
    assert as_lists(rows) == [[0, 1], [3, 4], [2]]


def test_the_second_budget_sends_a_sample_elsewhere():
    # Tokens alone would put sample 2 beside 0; its patches go beside 1 only.
    rows = pack_plainly([6, 5, 4], patches=[3, 0, 2], max_tokens=10, max_patches=4)
    assert as_lists(rows) == [[0], [1, 2]]


def test_best_fit_is_by_the_scarcer_budget():
    # Patches are scarce: 3 + 1 and 2 + 2 fill two rows of 4; tokens would fit into one.
    rows = pack_plainly([1, 1, 1, 1], patches=[2, 3, 2, 1], max_tokens=10, max_patches=4)
    assert sorted(as_lists(rows)) == [[0, 2], [1, 3]]


@settings(max_examples=200, deadline=None)
@given(samples, st.integers(20, 40), st.none() | st.integers(12, 30), st.integers(0, 5))
def test_each_sample_has_one_row_and_rows_keep_their_budgets(drawn, max_tokens, max_patches, seed):
    tokens, patches = np.array(drawn).T
    rows = pack(
        tokens,
        num_patches=patches,
        max_tokens=max_tokens,
        max_patches=max_patches,
        jitter=1 + 0.1 * np.random.default_rng(seed).random(len(tokens)),
    )
    assert sorted(rows.samples.tolist()) == list(range(len(tokens)))
    for row in rows:
        assert len(row) > 0
        assert tokens[row].sum() <= max_tokens
        assert max_patches is None or patches[row].sum() <= max_patches


def fewest_rows(sizes, *, room):
    """Try every way to put the sizes into rows."""
    for num_rows in range(1, len(sizes) + 1):
        for places in product(range(num_rows), repeat=len(sizes)):
            if max(np.bincount(places, weights=sizes)) <= room:
                return num_rows
    raise AssertionError("a size is larger than the room")


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 10), min_size=1, max_size=6))
def test_it_is_near_the_best_of_all(sizes):
    """The known bound of best-fit-decreasing: 11/9 of the fewest, and one."""
    rows = pack_plainly(sizes, max_tokens=10)
    fewest = fewest_rows(sizes, room=10)
    assert fewest <= len(rows) <= 11 / 9 * fewest + 1


def test_rows_of_mixed_lengths_waste_little():
    rng = np.random.default_rng(0)
    tokens = np.clip(rng.lognormal(6, 0.8, 20_000), 1, 4096).astype(int)
    rows = pack_plainly(tokens, max_tokens=4096)
    assert 1 - tokens.sum() / (4096 * len(rows)) < 0.005


def test_load_is_that_of_the_scarcer_budget():
    load = measure_load(
        np.array([512, 256]), num_patches=np.array([10, 30]), max_tokens=1024, max_patches=40
    )
    assert load.tolist() == [0.5, 0.75]
    assert measure_load(512, num_patches=9_999, max_tokens=1024, max_patches=None) == 0.5


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=20), st.data())
def test_resized_rows_are_as_many_as_asked_for(counts, data):
    rows = pack_rows(np.split(np.arange(sum(counts)), np.cumsum(counts)[:-1]))
    num_rows = data.draw(st.integers(0, sum(counts)))
    fills = np.random.default_rng(0).random(len(rows))
    resized, left = resize(rows, num_rows=num_rows, fills=fills)
    assert len(resized) == num_rows
    assert all(len(row) for row in resized)
    assert sorted([*resized.samples, *left]) == list(range(sum(counts)))
    assert not len(left) or num_rows < len(rows)


def test_the_emptiest_rows_go_and_the_longest_are_halved():
    rows = pack_rows([np.array([0, 1, 2, 3]), np.array([4]), np.array([5, 6])])
    fewer, left = resize(rows, num_rows=2, fills=np.array([0.9, 0.95, 0.2]))
    assert (sorted(as_lists(fewer)), left.tolist()) == ([[0, 1, 2, 3], [4]], [5, 6])
    more, left = resize(rows, num_rows=4, fills=np.ones(3))
    assert (as_lists(more), left.tolist()) == ([[0, 1], [2, 3], [4], [5, 6]], [])


@pytest.mark.parametrize("max_patches", [None, 64])
def test_equal_samples_pack_alike(max_patches):
    tokens, patches = np.full(100, 30), np.full(100, 16)
    first = pack_plainly(tokens, patches=patches, max_tokens=100, max_patches=max_patches)
    again = pack_plainly(tokens, patches=patches, max_tokens=100, max_patches=max_patches)
    np.testing.assert_array_equal(first.samples, again.samples)
    assert len(first) == 34
