"""Curves of few points: extremes stay, and nothing is invented."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.dashboard.thin import in_view, means, smooth, thin


@given(st.integers(0, 5000), st.integers(2, 300), st.integers(0, 2**31))
def test_extremes_and_order_stay(num, most, seed):
    draw = np.random.default_rng(seed)
    x, y = np.arange(num, dtype=float), draw.standard_normal(num)
    thin_x, thin_y = thin(x, y, most=most)
    assert len(thin_x) == len(thin_y) <= max(most, 2)
    assert np.array_equal(y[thin_x.astype(int)], thin_y)
    assert (np.diff(thin_x) > 0).all()
    if num:
        assert thin_y.min() == y.min()
        assert thin_y.max() == y.max()


def test_a_short_curve_stays_as_it_is():
    x, y = np.arange(5.0), np.array([1, np.nan, 3, np.inf, 5])
    thin_x, thin_y = thin(x, y, most=100)
    assert thin_x.tolist() == [0, 2, 4]
    assert thin_y.tolist() == [1, 3, 5]


def test_one_spike_of_a_hundred_thousand_is_seen():
    y = np.zeros(100_000, dtype=np.float32)
    y[77_777] = 9.0
    x, found = thin(np.arange(100_000.0), y)
    assert x[found == 9.0].tolist() == [77_777]


@pytest.mark.parametrize(
    ("view", "expected"),
    [(None, [0, 1, 2, 3, 4]), ((1.5, 2.5), [1, 2, 3]), ((1, 1), [0, 1, 2]), ((9, 10), [4])],
)
def test_what_is_in_view_has_a_point_more_at_each_side(view, expected):
    x = np.arange(5.0)
    assert x[in_view(x, view=view)].tolist() == expected


def test_means_keep_sums():
    values = np.array([[1.0, 10.0], [3.0, 10.0], [5.0, np.nan], [np.nan, np.nan], [9.0, 9.0]])
    x, found = means(np.arange(5.0), values, most=3)
    assert x.tolist() == [0, 2, 4]
    assert found.tolist() == [[2, 10], [5, 0], [9, 9]]


def test_smoothing_leaves_out_what_was_not_measured():
    y = np.array([1.0, np.nan, 3.0, 5.0])
    found = smooth(y, width=3)
    assert found[[0, 2, 3]].tolist() == pytest.approx([1.0, 4.0, 4.0])
    assert np.isnan(found[1])
    assert smooth(y, width=1) is y
