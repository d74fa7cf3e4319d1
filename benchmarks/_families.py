"""The tests of `tests/families`, run as a process of their own: what each says of its case.

In: options of pytest. Out: a `Tested` for each test that ran. The tests leave the case, the cell of
the table and the counts that they compare as properties in pytest's report.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Tested:
    """One test: its name, whether it passed, and its properties by name."""

    name: str
    passed: bool
    properties: dict[str, str]


def run_tests(*options: str) -> tuple[list[Tested], int]:
    """Run the tests of all families.

    Returns:
        What ran, and pytest's exit code: 0 if all passed and, with `--write-tables`, the table is
        written.
    """
    with tempfile.TemporaryDirectory(prefix="diptych-bench-") as folder:
        path = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "tests/families", "-q"]
        # The newer form of the report has no place for properties.
        command += [f"--junitxml={path}", "-o", "junit_family=xunit1"]
        done = subprocess.run([*command, *options], cwd=ROOT, check=False, stdout=sys.stderr)
        return read_report(path.read_text(encoding="utf-8")), done.returncode


def read_report(text: str) -> list[Tested]:
    """Read pytest's report; a test that was skipped did not pass."""
    return [
        Tested(
            name=case.attrib["name"],
            passed=not any(case.find(tag) is not None for tag in ("failure", "error", "skipped")),
            properties={
                each.attrib["name"]: each.attrib["value"] for each in case.iter("property")
            },
        )
        for case in ElementTree.fromstring(text).iter("testcase")
    ]
