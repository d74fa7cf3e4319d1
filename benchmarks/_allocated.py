"""Tensors' bytes as torch's CPU allocator gives and takes them: what a GPU's peak memory is there.

`with Allocated() as allocated:` goes around all work from before the model is built, `measured()`
around the steps that count; then `allocated.peak_bytes` is the most that lived during those. Unlike
the process' own memory it has no fragments in it, and unlike Python's view it sees what FSDP2
empties in place.
"""

from __future__ import annotations

from typing import Any, Self

import torch
from torch.profiler import ProfilerActivity, profile, record_function

_MARK = "diptych: measured"


class Allocated:
    """Follows the allocator; `peak_bytes` is there when it was left."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)

    def __enter__(self) -> Self:
        self._profile.__enter__()
        return self

    def __exit__(self, *failure: Any) -> None:
        self._profile.__exit__(*failure)
        results = self._profile.profiler
        assert results is not None, "the profiler has run"
        assert results.kineto_results is not None, "the profiler has run"
        events = sorted(results.kineto_results.events(), key=lambda event: event.start_ns())
        begin, end = next(
            (event.start_ns(), event.end_ns()) for event in events if event.name() == _MARK
        )
        now = peak = 0
        for event in events:
            if event.name() == "[memory]":
                if event.start_ns() < begin:
                    peak = now
                now += event.nbytes()
                if begin <= event.start_ns() <= end:
                    peak = max(peak, now)
        self.peak_bytes = peak


def measured() -> torch.profiler.record_function:
    """Mark what counts."""
    return record_function(_MARK)
