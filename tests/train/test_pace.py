"""Whether saves wait: worked out by hand from seconds that are made up."""

from __future__ import annotations

import pytest

from diptych.train.pace import Pace
from diptych.train.retention import Keep, Saved, steps_to_keep


def _save(pace: Pace, *, stall_s: float, steps_s: list[float]) -> bool:
    """One save and the steps that follow; returns how it was done."""
    is_async = pace.is_async
    if is_async:
        pace.begin(stall_s)
        for step_s in steps_s:
            pace.note_step(step_s)
        pace.end()
    else:
        pace.note_waited(1.0)
        for _ in steps_s:
            pace.note_step(0.1)
    return is_async


@pytest.mark.parametrize(
    ("slow_s", "lost_s", "then"),
    [
        # 0.2 of stall and 10 steps that take 0.02 longer than 0.1.
        pytest.param(0.12, 0.4, True, id="cores are spare"),
        # 0.2 and 10 steps of 0.2: 1.2 against 1.0.
        pytest.param(0.2, 1.2, False, id="none is spare"),
    ],
)
def test_each_way_is_tried_and_the_one_that_loses_less_is_kept(slow_s, lost_s, then):
    pace = Pace("auto")
    for _ in range(20):
        pace.note_step(0.1)
    ways = [_save(pace, stall_s=0.2, steps_s=[slow_s] * 10) for _ in range(11)]
    assert ways == [False, True, *[then] * 9]
    assert pace.lost_s(True) == pytest.approx(lost_s)
    assert pace.lost_s(False) == 1.0
    # Now and then the other way is tried again.
    assert {_save(pace, stall_s=0.2, steps_s=[slow_s] * 10) for _ in range(12)} == {True, False}


def test_who_asks_for_one_way_gets_it():
    assert Pace("async").is_async
    assert not Pace("sync").is_async


def test_steps_that_happen_to_be_faster_gain_nothing():
    pace = Pace("async")
    pace.note_step(1.0)
    pace.begin(0.2)
    pace.note_step(0.1)
    pace.end()
    assert pace.lost_s(True) == pytest.approx(0.2)


def test_what_is_kept():
    saved = [Saved(step, score) for step, score in ((5, 2.0), (10, 1.0), (17, 1.0), (20, None))]
    assert steps_to_keep(saved, keep=Keep(last=1)) == {20}
    assert steps_to_keep(saved, keep=Keep(last=2)) == {17, 20}
    # The earlier of two that are equally good.
    assert steps_to_keep(saved, keep=Keep(last=1, best="loss")) == {10, 20}
    assert steps_to_keep(saved, keep=Keep(last=1, every_steps=8)) == {10, 17, 20}
    assert steps_to_keep([], keep=Keep(last=3, every_steps=2, best="loss")) == set()
