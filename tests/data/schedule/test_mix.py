from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from diptych.core.errors import ConfigError
from diptych.core.records import ScheduleSpec
from diptych.data.schedule.mix import repeats_of_sources, spread


def repeats(*, num_samples=(100, 300), sources=("charts", "captions"), **spec):
    return repeats_of_sources(
        ScheduleSpec(**spec), sources=sources, num_samples=np.array(num_samples)
    ).tolist()


def test_each_sample_is_taken_once_unless_told_otherwise():
    assert repeats() == [1, 1]
    assert repeats(repeats={"charts": 2.5}) == [2.5, 1]


def test_weights_are_shares_of_an_epoch_as_long_as_all_samples():
    # 400 samples, half of them charts: 200 of 100, and 200 of 300.
    assert repeats(weights={"charts": 3, "captions": 3}) == [2, 2 / 3]


def test_a_source_without_samples_has_no_share():
    assert repeats(num_samples=(0, 300), weights={"charts": 9, "captions": 1}) == [0, 1]


def test_a_source_without_samples_needs_no_weight():
    assert repeats(num_samples=(0, 300), weights={"captions": 1})[1] == 1


def test_a_source_can_be_left_out():
    assert repeats(repeats={"charts": 0}) == [0, 1]
    assert repeats(weights={"charts": 0, "captions": 1}) == [0, 4 / 3]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"repeats": {"chart": 2}}, r"repeats names 'chart', which is no source.*'charts'"),
        ({"weights": {"x": 2}}, r"weights names 'x', which is no source.*captions, charts"),
        ({"weights": {"charts": 1}}, r"does not name the source captions.*0 leaves it out"),
        ({"weights": {"charts": 0, "captions": 0}}, r"leaves no sample in an epoch"),
    ],
)
def test_what_cannot_be_meant_is_refused(spec, message):
    with pytest.raises(ConfigError, match=message):
        repeats(**spec)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 1), st.integers(0, 50)), min_size=1, max_size=20),
    st.floats(0, 3),
)
@example([(0, 50), (1, 50)], 0.5)
def test_fractions_add_up_over_a_sources_shards(shards, repeat):
    shard_sources, num_samples = np.array(shards).T
    assume(num_samples[shard_sources == 1].any())
    whole, further = spread(
        np.array([repeat, 1.0]), shard_sources=shard_sources, num_samples=num_samples
    )
    mine = shard_sources == 0
    assert ((further >= 0) & (further <= num_samples)).all()
    taken = (whole * num_samples + further)[mine].sum()
    assert abs(taken - repeat * num_samples[mine].sum()) <= 0.5 + 1e-6
    assert (whole[~mine] == 1).all()
    assert not further[~mine].any()


@pytest.mark.parametrize("repeat", [0.0, 0.01])
def test_an_epoch_without_samples_is_refused(repeat):
    with pytest.raises(ConfigError, match="repeats leaves no sample in an epoch"):
        spread(np.array([repeat]), shard_sources=np.zeros(2, int), num_samples=np.array([9, 7]))
