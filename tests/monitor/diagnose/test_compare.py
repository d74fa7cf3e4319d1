"""Two runs beside each other: which part explains the difference."""

from __future__ import annotations

import pytest

from diptych.monitor.diagnose.compare import compare
from diptych.monitor.diagnose.signals import measure

from .records import healthy, step


def signals(*, change=lambda phases: None, **fields):
    records = []
    for number in range(1, 31):
        phases = healthy(number)
        change(phases)
        records.append(step(number, phases, **fields))
    return measure(records)


def against_healthy(found):
    return compare(found, against=signals(), run_ids=("new", "old"), num_ranks=(2, 2))


def test_the_phase_that_takes_longer_explains_a_slower_run():
    def slower(phases):
        phases["data"] = (0.26, 0.26)

    found = against_healthy(signals(change=slower))
    # 1.00 s before, 1.25 s now.
    assert found.speedup == pytest.approx(1.0 / 1.25)
    first, *rest = found.parts
    assert (first.name, first.lost_s) == ("data", pytest.approx(0.25))
    assert first.missing == pytest.approx(0.25 / 1.25)
    assert all(abs(part.missing) < 1e-9 for part in rest)
    assert found.verdict == "0.8 times as fast: data -0.2"


def test_twice_the_rows_in_a_step_are_twice_the_work():
    def twice(phases):
        for name, took in phases.items():
            phases[name] = tuple(2 * each for each in took)

    found = against_healthy(signals(change=twice, num_text_tokens=1200, num_image_tokens=800))
    assert found.speedup == pytest.approx(1.0)
    assert all(abs(part.missing) < 1e-9 for part in found.parts)


def test_a_faster_part_counts_for_the_run():
    def faster(phases):
        phases["communication"] = (0.0, 0.0)

    found = against_healthy(signals(change=faster))
    assert found.speedup == pytest.approx(1.0 / 0.95)
    assert found.parts[0].name == "communication"
    assert found.parts[0].missing == pytest.approx(-0.05 / 0.95)


def test_old_logs_have_a_speedup_and_no_parts():
    old = measure([step(number, step_s=2.0) for number in range(1, 31)])
    found = compare(old, against=signals(), run_ids=("new", "old"), num_ranks=(2, 2))
    assert found.speedup == pytest.approx(0.5)
    assert found.parts == ()
    assert found.missing == ("where ranks' time went in run new (phases_s)",)
