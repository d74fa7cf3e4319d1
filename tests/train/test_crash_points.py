"""Killed, torn, out of room or in error inside a save: the newest whole checkpoint stays."""

from __future__ import annotations

from tests.train.crash_points import draw, hit_all
from tests.train.faults import KINDS


def test_whatever_hits_a_save_the_run_resumes_from_a_whole_checkpoint(tmp_path):
    assert {point.kind for point in draw(60, seed=0)} == set(KINDS)
    assert hit_all(60, seed=0, folder=tmp_path) == {}
