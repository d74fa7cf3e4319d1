"""The tables of promise 3: what cells found in a test run, `docs/resume.md` out."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from tests.parallel import reshard
from tests.train import resume

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "resume.md"


@dataclass(frozen=True)
class Shape:
    """Which table of the document: what its first column is of, its rows, its other columns."""

    name: str
    of: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]


ENDINGS_TABLE = Shape("endings", "layout", tuple(resume.LAYOUTS), tuple(resume.ENDINGS))
SETTINGS_TABLE = Shape("settings", "setting", tuple(resume.SETTINGS), ("resumed",))
RESHARD_TABLE = Shape(
    "layouts", "saved on, loaded on", tuple(reshard.LAYOUTS), tuple(reshard.LAYOUTS)
)


@dataclass
class Table:
    """Collects the cells of one test run."""

    shape: Shape
    found: dict[tuple[str, str], str] = field(default_factory=dict)

    def add(self, row: str, column: str, text: str) -> None:
        """Take note of a cell that passed."""
        self.found[row, column] = text

    def write(self) -> None:
        """Replace the table in the document.

        Raises:
            RuntimeError: not every cell passed, or not every one was run.
        """
        places = [(row, column) for row in self.shape.rows for column in self.shape.columns]
        missing = [place for place in places if place not in self.found]
        if missing:
            raise RuntimeError(f"{len(missing)} cells did not pass, so no table: {missing[:3]}")
        text = DOCUMENT.read_text(encoding="utf-8")
        before, _, rest = text.partition(self._begin)
        _, _, after = rest.partition(self._end)
        block = f"{self._begin}\n{self._lines()}\n{self._end}"
        DOCUMENT.write_text(f"{before}{block}{after}", encoding="utf-8")

    def listed(self) -> dict[tuple[str, str], str]:
        """Read the cells of the document."""
        text = DOCUMENT.read_text(encoding="utf-8")
        block = text.partition(self._begin)[2].partition(self._end)[0]
        rows = [
            [cell.strip() for cell in line.strip()[1:-1].split("|")]
            for line in block.splitlines()
            if line[:1] == "|"
        ]
        return {
            (row, column): cell
            for row, *cells in rows[2:]
            for column, cell in zip(rows[0][1:], cells, strict=True)
        }

    def _lines(self) -> str:
        columns = self.shape.columns
        lines = [
            f"| {self.shape.of} | {' | '.join(columns)} |",
            f"| --- |{' --- |' * len(columns)}",
        ]
        for row in self.shape.rows:
            cells = " | ".join(self.found[row, column] for column in columns)
            lines.append(f"| {row} | {cells} |")
        return "\n".join(lines)

    @property
    def _begin(self) -> str:
        return f"<!-- {self.shape.name} -->"

    @property
    def _end(self) -> str:
        return f"<!-- end of {self.shape.name} -->"


def short(value: float) -> str:
    """Write a deviation in one significant digit."""
    mantissa, _, exponent = f"{value:.0e}".partition("e")
    return "0" if value == 0 else f"{mantissa}e{int(exponent)}"
