"""The table of `docs/families.md`: cells that passed, of those that ran.

A row is a family or a composition of towers, a column what is asked of it (counts, forward, curves
over each engine, parity and so on). The tests of `tests/families` run in a process of their own,
and write the table if every cell passed; peers are those of the tests: transformers' processors and
models, torch's counter of FLOPs, and a single process. A cell of several tests passes if all do.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from _families import Tested, run_tests
from run import Measured


def measure(options: argparse.Namespace) -> Measured:
    """Run the tests."""
    tested, exit_code = run_tests("--write-tables")
    return judge(tested, exit_code=exit_code)


def judge(tested: Sequence[Tested], *, exit_code: int) -> Measured:
    """Count cells."""
    cells: dict[tuple[str, str], bool] = {}
    for each in tested:
        if "cell" in each.properties:
            cell = each.properties["case"], each.properties["cell"]
            cells[cell] = cells.get(cell, True) and each.passed
    num_passed = sum(cells.values())
    ratio = num_passed / len(cells) if cells else 0.0
    return Measured(
        unit="cells passed",
        ours=num_passed,
        peers={"cells run": len(cells)},
        ratio=ratio,
        goal="1: every cell passes, and so does every other test of families",
        met=ratio == 1 and exit_code == 0,
        raw={
            "cases": list(dict.fromkeys(case for case, _ in cells)),
            "columns": list(dict.fromkeys(column for _, column in cells)),
            "failed_cells": [list(cell) for cell, passed in cells.items() if not passed],
            "failed_tests": [each.name for each in tested if not each.passed],
            "num_tests": len(tested),
        },
    )


if __name__ == "__main__":
    from run import main

    main(["families"])
