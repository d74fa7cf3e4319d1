"""The table of families: which tests passed flows in, the table of `docs/families.md` flows out."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from tests.families.cases import CASES

TABLE = Path(__file__).resolve().parents[2] / "docs" / "families.md"
_BEGIN, _END = "<!-- table -->", "<!-- end of the table -->"

COLUMNS = {
    "test_an_image_of_any_size_becomes_what_the_processor_makes_of_it": "tokens and pixels",
    "test_labels_are_what_the_template_marks": "labels",
    "test_the_loss_is_that_of_transformers_own_forward": "forward",
    "test_flops_are_those_torch_counts": "FLOPs",
    "test_a_sample_of_a_packed_row_does_not_see_its_neighbours": "packing",
    "test_same_loss[ddp": "DDP",
    "test_same_loss[fsdp2": "FSDP2",
    "test_same_loss[zero 2": "ZeRO 2",
    "test_same_loss[zero 3": "ZeRO 3",
    "test_parity": "parity",
    "test_it_answers_as_its_readme_says": "generation",
}
"""Which tests a column stands for, by how their names begin."""


@dataclass
class Table:
    """Collects what passed in one test run."""

    passed: set[tuple[str, str]] = field(default_factory=set)
    failed: set[tuple[str, str]] = field(default_factory=set)

    def add(self, test: str, *, case: str, passed: bool) -> None:
        """Take note of a test of a case, if there is a column for it."""
        column = column_of(test)
        if column is not None:
            (self.passed if passed else self.failed).add((case, column))

    def write(self) -> None:
        """Replace the table in the document.

        Raises:
            RuntimeError: not every cell passed, or not every one was run.
        """
        cells = {(case, column) for case in CASES for column in COLUMNS.values()}
        missing = sorted(cells - (self.passed - self.failed))
        if missing:
            raise RuntimeError(f"{len(missing)} cells did not pass, so no table: {missing[:3]}")
        text = TABLE.read_text(encoding="utf-8")
        before, _, rest = text.partition(_BEGIN)
        _, _, after = rest.partition(_END)
        TABLE.write_text(f"{before}{_BEGIN}\n{lines(CASES)}\n{_END}{after}", encoding="utf-8")


def column_of(test: str) -> str | None:
    """Return the column that a test belongs to, by its name."""
    return next((column for start, column in COLUMNS.items() if test.startswith(start)), None)


def lines(cases) -> str:
    """Write the table in which every cell passed."""
    columns = list(COLUMNS.values())
    rows = [
        f"| family | {' | '.join(columns)} |",
        f"| --- |{' --- |' * len(columns)}",
        *(f"| {case} |{' passed |' * len(columns)}" for case in cases),
    ]
    return "\n".join(rows)


def listed() -> str:
    """Read the table that the document has."""
    text = TABLE.read_text(encoding="utf-8")
    return text.partition(_BEGIN)[2].partition(_END)[0].strip()
