"""The benchmarks `families` and `flops` read what the tests of families report."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

REPORT = """<?xml version="1.0" encoding="utf-8"?>
<testsuites><testsuite name="pytest" tests="4">
<testcase classname="t" name="test_parity[llava]" time="1"><properties>
<property name="case" value="llava"/><property name="cell" value="parity"/></properties></testcase>
<testcase classname="t" name="test_flops[llava-a]" time="1"><properties>
<property name="case" value="llava"/><property name="cell" value="FLOPs"/>
<property name="forward" value="101"/><property name="forward_of_torch" value="100"/>
<property name="training" value="297"/><property name="training_of_torch" value="300"/>
</properties></testcase>
<testcase classname="t" name="test_flops[llava-b]" time="1"><properties>
<property name="case" value="llava"/><property name="cell" value="FLOPs"/></properties>
<failure message="no">no</failure></testcase>
<testcase classname="t" name="test_listed" time="1"/>
</testsuite></testsuites>
"""


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> tuple[ModuleType, ModuleType, ModuleType]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import _families
    import families
    import flops

    return _families, families, flops


def test_a_cell_passes_if_all_of_its_tests_do(modules) -> None:
    reading, families, _ = modules
    tested = reading.read_report(REPORT)
    found = families.judge(tested, exit_code=1)
    assert (found.ours, found.peers, found.ratio) == (1, {"cells run": 2}, 0.5)
    assert not found.met
    assert found.raw["failed_cells"] == [["llava", "FLOPs"]]
    passed = [each for each in tested if each.passed]
    assert families.judge(passed, exit_code=0).met
    assert not families.judge(passed, exit_code=1).met
    assert not families.judge([], exit_code=0).met


def test_the_largest_difference_counts(modules) -> None:
    reading, _, flops = modules
    tested = reading.read_report(REPORT)
    found = flops.judge(tested[1:2])
    assert found.ratio == pytest.approx(0.01)
    assert found.peers == {"torch's counter": pytest.approx(300e-9)}
    with pytest.raises(RuntimeError, match="before it had counted"):
        flops.judge(tested[1:3])
