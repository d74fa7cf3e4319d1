"""The windows of an epoch: a few shards each, shuffled together, independent of the other windows.

Eligible samples per shard and the spec flow in; which shards are in which window, and the samples
of a window, flow out. An *entry* is one shard taken once; a shard with repeats has several, and one
of them may take only a part of it, drawn anew each epoch. How many samples (and how much load) a
window has is known without drawing any.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from diptych.core.records import ScheduleSpec
from diptych.data.schedule.draws import Draws
from diptych.data.schedule.eligible import Eligible
from diptych.data.schedule.mix import spread
from diptych.data.schedule.pack import measure_load

_ENTRY = 1
_WINDOW = 2


@dataclass(frozen=True, eq=False)
class Window:
    """One window of an epoch.

    Attributes:
        epoch: of which.
        number: its place in the epoch.
        entries: [number of entries] int64.
        num_samples: of all entries together.
        load: how many rows the scarcer budget alone would need.
    """

    epoch: int
    number: int
    entries: np.ndarray
    num_samples: int
    load: float


class Windows:
    """The windows of every epoch."""

    def __init__(
        self,
        eligible: Eligible,
        *,
        repeats: np.ndarray,
        shard_sources: np.ndarray,
        spec: ScheduleSpec,
    ) -> None:
        """List the entries.

        Args:
            eligible: the samples.
            repeats: [number of sources], how often an epoch takes a source's samples.
            shard_sources: [num_shards], the source of each shard.
            spec: the window's size, the row's budgets and the seed.
        """
        self._eligible = eligible
        self._spec = spec
        whole, further = spread(
            repeats, shard_sources=shard_sources, num_samples=eligible.num_samples
        )
        shards = np.arange(len(whole))
        copies = whole + (further > 0)
        self._shards = np.repeat(shards, copies)
        self._copies = np.arange(copies.sum()) - np.repeat(np.cumsum(copies) - copies, copies)
        is_part = self._copies == whole[self._shards]
        all_of_shard = eligible.num_samples[self._shards]
        self._num_samples = np.where(is_part, further[self._shards], all_of_shard)
        used = self._num_samples > 0
        self._shards, self._copies = self._shards[used], self._copies[used]
        self._num_samples = self._num_samples[used]
        share = self._num_samples / all_of_shard[used]
        self._num_tokens = eligible.num_tokens[self._shards] * share
        self._num_patches = eligible.num_patches[self._shards] * share

    @property
    def num_samples(self) -> int:
        """Count an epoch's samples, each as often as it is taken."""
        return int(self._num_samples.sum())

    def of_epoch(self, epoch: int) -> list[Window]:
        """Return an epoch's windows in their order."""
        order = Draws(self._spec.seed, epoch).permutation(len(self._shards))
        size = self._spec.window_shards
        return [
            self._window(order[first : first + size], epoch=epoch, number=number)
            for number, first in enumerate(range(0, len(order), size))
        ]

    def typical(self) -> Window:
        """Return a window of entries that are evenly spread over all, so over all sources."""
        size = min(self._spec.window_shards, len(self._shards))
        entries = np.arange(size) * len(self._shards) // size
        return self._window(entries, epoch=0, number=0)

    def draw(self, window: Window) -> np.ndarray:
        """Return a window's samples, [num_samples] int64, each entry's in random order."""
        return np.concatenate([self._draw_entry(window, entry=entry) for entry in window.entries])

    def draw_last(self, window: Window, *, num_samples: int) -> np.ndarray:
        """Return the last samples that `draw` returns, without drawing the others."""
        parts = [np.empty(0, dtype=np.int64)]
        missing = num_samples
        for entry in window.entries[::-1]:
            if missing == 0:
                break
            part = self._draw_entry(window, entry=entry)[-missing:]
            parts.append(part)
            missing -= len(part)
        return np.concatenate(parts[::-1])

    def draws(self, window: Window) -> Draws:
        """Return the random numbers of a window, the same each time."""
        return Draws(self._spec.seed, window.epoch, _WINDOW, window.number)

    def _window(self, entries: np.ndarray, *, epoch: int, number: int) -> Window:
        load = measure_load(
            self._num_tokens[entries].sum(),
            num_patches=self._num_patches[entries].sum(),
            max_tokens=self._spec.max_row_tokens,
            max_patches=self._spec.max_row_patches,
        )
        num_samples = int(self._num_samples[entries].sum())
        return Window(
            epoch=epoch, number=number, entries=entries, num_samples=num_samples, load=float(load)
        )

    def _draw_entry(self, window: Window, *, entry: int) -> np.ndarray:
        shard, copy = int(self._shards[entry]), int(self._copies[entry])
        samples = self._eligible.samples(shard)
        draws = Draws(self._spec.seed, window.epoch, _ENTRY, shard, copy)
        return samples[draws.permutation(len(samples))[: self._num_samples[entry]]]
