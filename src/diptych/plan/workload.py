"""What the training data asks of a micro-batch: sample_costs in, counts out.

Only sums and maxima are kept, so that a plan needs no sample in memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from diptych.core.errors import FormatError
from diptych.core.tables import SAMPLE_COSTS
from diptych.shape.flops import BatchCounts

_COLUMNS = ("num_tokens", "num_label_tokens", "num_patches", "num_images")


@dataclass(frozen=True)
class Workload:
    """The costs of one split's samples, each [N] int64."""

    num_tokens: np.ndarray
    num_label_tokens: np.ndarray
    num_patches: np.ndarray
    num_images: np.ndarray

    def heaviest(self, num_rows: int) -> BatchCounts:
        """Bound a micro-batch of that many rows by the split's largest tokens, patches and labels.

        Every row is padded to the longest of all.
        """
        longest = int(self.num_tokens.max())
        patches = _largest(self.num_patches, count=num_rows)
        return BatchCounts(
            num_tokens=num_rows * longest,
            squared_tokens=num_rows * longest**2,
            num_patches=int(patches.sum()),
            squared_patches=int((patches**2).sum()),
            num_head_tokens=int(_largest(self.num_label_tokens, count=num_rows).sum()),
        )

    def mean(self, num_rows: int) -> BatchCounts:
        """Describe that many average rows without padding; a sample's images count as alike."""
        scale = num_rows / len(self.num_tokens)
        per_image = self.num_patches**2 / np.maximum(self.num_images, 1)
        return BatchCounts(
            num_tokens=round(scale * int(self.num_tokens.sum())),
            squared_tokens=round(scale * int((self.num_tokens**2).sum())),
            num_patches=round(scale * int(self.num_patches.sum())),
            squared_patches=round(scale * float(per_image.sum())),
            num_head_tokens=round(scale * int(self.num_label_tokens.sum())),
        )


def read_workload(sample_costs: Path, *, split: str = "train") -> Workload:
    """Read one split's costs.

    Raises:
        FormatError: there is no cost of that split, or a file lacks a column.
    """
    files = sorted((sample_costs / split).rglob("*.parquet"))
    wanted = {name: SAMPLE_COSTS.field(name) for name in _COLUMNS}
    columns: dict[str, list[np.ndarray]] = {name: [] for name in wanted}
    for file in files:
        schema = pq.read_schema(file)
        missing = [name for name in wanted if name not in schema.names]
        if missing:
            raise FormatError(
                f"The sample costs {file.name} have no column {', '.join(missing)}",
                cure="Run the prepare pipeline again",
            )
        table = pq.read_table(file, columns=list(wanted))
        for name in wanted:
            columns[name].append(table.column(name).to_numpy().astype(np.int64))
    if sum(len(part) for part in columns["num_tokens"]) == 0:
        raise FormatError(
            f"There are no sample costs of the split '{split}' in {sample_costs}",
            cure="Run the prepare pipeline, and look into its quarantine",
        )
    return Workload(**{name: np.concatenate(parts) for name, parts in columns.items()})


def _largest(values: np.ndarray, *, count: int) -> np.ndarray:
    """Return the largest values; where there are too few they repeat, as rows may."""
    ordered = np.sort(values)[::-1][:count]
    return np.resize(ordered, count)
