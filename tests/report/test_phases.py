"""Phases against sums worked out by hand; see `logs.PHASES_S`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from diptych.core.records import Over
from diptych.monitor.diagnose.times import PHASES
from diptych.report.phases import COLORS, cut_from, phase_curves, phase_rows
from diptych.report.steps import Steps, read_steps

from .conftest import Finished
from .logs import PHASES_S


def test_shares_and_the_rank_with_most(finished: Finished) -> None:
    rows = phase_rows(read_steps(Path(finished.run.folder)))
    assert [row.name for row in rows] == [
        "backward",
        "forward",
        "communication",
        "update",
        "data",
        "other",
    ]
    # The means are 0.12, 0.08, 0.04, 0.02, 0.01 and 0.01 of 0.28 s.
    assert [row.share for row in rows] == pytest.approx(
        [12 / 28, 8 / 28, 4 / 28, 2 / 28, 1 / 28, 1 / 28]
    )
    backward = rows[0]
    assert (backward.least_s, backward.mean_s, backward.most_s) == pytest.approx((0.10, 0.12, 0.14))
    assert (backward.rank, backward.rank_share) == (1, 1.0)
    assert backward.above == pytest.approx(1 / 6)
    assert rows[1].above == pytest.approx(0)


def test_the_rank_with_most_is_that_of_most_steps(finished: Finished) -> None:
    records = read_steps(Path(finished.run.folder)).records[:4]
    ranks = (1, 0, 1, 1)
    changed = tuple(
        each.model_copy(update={"phases_s": {"forward": Over(0.1, 0.2, 0.3, rank)}})
        for each, rank in zip(records, ranks, strict=True)
    )
    (row,) = phase_rows(Steps(changed))
    assert (row.rank, row.rank_share, row.share) == (1, 0.75, 1.0)


def test_the_chart_stacks_every_phase_that_took_time(finished: Finished) -> None:
    steps = read_steps(Path(finished.run.folder))
    traces = {trace.name: trace for trace in phase_curves(steps).data}
    assert set(traces) == set(PHASES_S)
    assert {trace.stackgroup for trace in traces.values()} == {"phases"}
    assert list(traces["data"].x) == list(range(1, 121))
    np.testing.assert_allclose(np.sum([trace.y for trace in traces.values()], axis=0), 0.28)
    assert set(COLORS) == set(PHASES), "each phase has a colour"


def test_a_step_with_a_checkpoint_does_not_flatten_the_others(finished: Finished) -> None:
    records = read_steps(Path(finished.run.folder)).records
    saved = {**PHASES_S, "checkpoint": Over(5.0, 5.0, 5.0, 0)}
    steps = Steps(
        (*records[:60], records[60].model_copy(update={"phases_s": saved}), *records[61:])
    )
    assert cut_from(Steps(records)) is None
    # Three times the median of 0.28 s.
    assert cut_from(steps) == pytest.approx(0.84)
    assert phase_curves(steps).layout.yaxis.range[1] == pytest.approx(0.84)


def test_steps_without_phases_are_left_out(finished: Finished) -> None:
    records = read_steps(Path(finished.run.folder)).records
    bare = tuple(each.model_copy(update={"phases_s": {}}) for each in records)
    assert phase_rows(Steps(bare)) == []
    assert not phase_curves(Steps(bare)).data
    assert cut_from(Steps(bare)) is None
    mixed = Steps((*bare[:50], *records[50:]))
    assert list(phase_curves(mixed).data[0].x) == list(range(51, 121))
    assert phase_rows(mixed)[0].mean_s == pytest.approx(0.12)
