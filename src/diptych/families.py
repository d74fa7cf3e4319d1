"""Which families are built and what each of them takes: their own data in, a table out."""

from __future__ import annotations

import rich
import rich.table

from diptych.data import fitted
from diptych.data.described import processor_of
from diptych.shape.families import family, names


def show_families() -> None:
    """Print the families that are built."""
    table = rich.table.Table(box=None, padding=(0, 2, 0, 0))
    for title in ("family", "images", "processor", "can be fitted"):
        # A narrow terminal breaks sentences, not names.
        table.add_column(title, overflow="fold", no_wrap=title != "images")
    for name in names():
        table.add_row(
            name,
            family(name).images,
            processor_of(name),
            "yes" if name in fitted.names() else "no",
        )
    rich.print(table)
    rich.print("Each packs, and trains over ddp, fsdp2 and zero; what is tested: docs/families.md")
