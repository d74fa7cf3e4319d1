"""Rows of samples: what a schedule says of a batch, before anything is read.

A *row* is one line of a batch's tensors. It holds one sample (mode `bucket`), several (mode
`pack`) or none (where a batch has fewer rows than its ranks need). Samples are numbers within a
split. Knows nothing of tokens or ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Rows:
    """Some rows.

    Attributes:
        samples: [M] int64, the samples of all rows, row after row.
        starts: [N + 1] int64; row r holds samples[starts[r] : starts[r + 1]].
    """

    samples: np.ndarray
    starts: np.ndarray

    def __len__(self) -> int:
        """Count the rows."""
        return len(self.starts) - 1

    def __iter__(self) -> Iterator[np.ndarray]:
        """Yield each row's samples."""
        return (self.row(number) for number in range(len(self)))

    def row(self, number: int) -> np.ndarray:
        """Return one row's samples, [number of samples] int64."""
        return self.samples[self.starts[number] : self.starts[number + 1]]

    def take(self, numbers: Sequence[int] | np.ndarray) -> Rows:
        """Return some of the rows in the order given; -1 stands for an empty row."""
        return pack_rows([self.row(n) if n >= 0 else self.samples[:0] for n in numbers])


def pack_rows(rows: Sequence[np.ndarray]) -> Rows:
    """Put rows of samples one after the other."""
    starts = np.cumsum([0, *(len(row) for row in rows)], dtype=np.int64)
    return Rows(np.concatenate([np.empty(0, dtype=np.int64), *rows]), starts)
