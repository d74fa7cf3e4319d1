"""The table of promise 2: what the cells of the matrix deviate by in, `docs/same_loss.md` out."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from tests.parallel.matrix import COLUMNS, LAYOUTS, table_cell

TABLE = Path(__file__).resolve().parents[2] / "docs" / "same_loss.md"
_BEGIN, _END = "<!-- table -->", "<!-- end of the table -->"


@dataclass(frozen=True)
class Deviation:
    """Relative: the worst loss of the steps, the whole first gradient (L2)."""

    loss: float
    gradient: float


@dataclass(frozen=True)
class Listed:
    """A cell as the document has it: a deviation, or why it is refused."""

    deviation: str | None
    refused: str | None


@dataclass
class Table:
    """Collects the cells of one test run."""

    found: dict[tuple[str, str], Deviation] = field(default_factory=dict)

    def add(self, layout: str, column: str, deviation: Deviation) -> None:
        """Take note of a cell that ran."""
        self.found[layout, column] = deviation

    def write(self) -> None:
        """Replace the table in the document; nothing where not every cell was run."""
        refusals = _refusals()
        places = [(layout, column) for layout in LAYOUTS for column in COLUMNS]
        missing = [place for place in places if place not in {*self.found, *refusals}]
        if missing:
            raise RuntimeError(f"{len(missing)} cells did not pass, so no table: {missing[:3]}")
        text = TABLE.read_text(encoding="utf-8")
        before, _, rest = text.partition(_BEGIN)
        _, _, after = rest.partition(_END)
        lines = "\n".join(self._lines(refusals))
        TABLE.write_text(f"{before}{_BEGIN}\n{lines}\n{_END}{after}", encoding="utf-8")

    def _lines(self, refusals: dict[tuple[str, str], str]) -> list[str]:
        reasons = sorted(set(refusals.values()))
        notes = {reason: f"[{number}]" for number, reason in enumerate(reasons, start=1)}
        lines = [
            f"| layout | {' | '.join(COLUMNS)} |",
            f"| --- |{' --- |' * len(COLUMNS)}",
        ]
        for layout in LAYOUTS:
            shown = [
                notes[refusals[layout, column]]
                if (layout, column) in refusals
                else _short(self.found[layout, column].loss)
                for column in COLUMNS
            ]
            lines.append(f"| {layout} | {' | '.join(shown)} |")
        lines += ["", *(f"- {note} refused: {reason}" for reason, note in notes.items()), ""]
        gradients = [
            deviation.gradient
            for (layout, column), deviation in self.found.items()
            if not table_cell(layout, column).rounds
        ]
        lines.append(
            f"The whole first gradient of the {len(gradients)} cells in fp32 deviates by "
            f"{_short(max(gradients))} at most. {len(self.found)} cells ran, "
            f"{len(refusals)} are refused."
        )
        return lines


def cells_of(text: str) -> dict[tuple[str, str], Listed]:
    """Read the cells of the document.

    Raises:
        ValueError: it holds no table, or a cell that is neither a number nor a note.
    """
    block = text.partition(_BEGIN)[2].partition(_END)[0]
    rows = [line.strip("| ").split(" | ") for line in block.splitlines() if line.startswith("|")]
    if not rows:
        raise ValueError("the document has no table")
    reasons = dict(re.findall(r"^- (\[\d+\]) refused: (.+)$", block, flags=re.MULTILINE))
    return {
        (layout, column): _read(cell, reasons=reasons)
        for layout, *cells in rows[2:]
        for column, cell in zip(rows[0][1:], cells, strict=True)
    }


def _read(cell: str, *, reasons: dict[str, str]) -> Listed:
    if cell in reasons:
        return Listed(None, reasons[cell])
    if not re.fullmatch(r"0|\de[+-]\d+", cell):
        raise ValueError(f"'{cell}' is neither a deviation nor a note")
    return Listed(cell, None)


def _refusals() -> dict[tuple[str, str], str]:
    found = {
        (layout, column): table_cell(layout, column).refused
        for layout in LAYOUTS
        for column in COLUMNS
    }
    return {place: reason for place, reason in found.items() if reason}


def _short(value: float) -> str:
    mantissa, _, exponent = f"{value:.0e}".partition("e")
    return "0" if value == 0 else f"{mantissa}e{int(exponent)}"
