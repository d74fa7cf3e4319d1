"""Samples of a run's nodes, read back: a folder of `<node>.jsonl` in, `NodeSample`s out.

Files are read from their ends, and no further back than asked for; damaged lines are left out.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from pydantic import ValidationError

from diptych.core.records import NodeSample
from diptych.monitor.tails import last_lines

_FIRST_BYTES = 16 * 1024
_MOST_BYTES = 64 * 1024 * 1024
"""More than a file grows to; those of former releases grew without end."""


def read_samples(
    folder: Path,
    *,
    since_s: float,
    until_s: float = float("inf"),
    most_bytes: int = _MOST_BYTES,
) -> list[NodeSample]:
    """Read all nodes' samples of a time, in its order.

    Args:
        folder: the run's folder of samples; one that is not there has none.
        since_s: seconds since 1970.
        until_s: seconds since 1970.
        most_bytes: of each file, from its end. A time that lies further back is cut there.
    """
    found = []
    for path in _files(folder):
        samples = _read_back(path, since_s=since_s, most_bytes=most_bytes)
        found += [each for each in samples if since_s <= each.time_s <= until_s]
    return sorted(found, key=lambda sample: (sample.time_s, sample.node))


def newest_samples(folder: Path, *, now_s: float, within_s: float) -> dict[str, NodeSample]:
    """Read every node's newest sample; a node whose last one is older has none."""
    newest: dict[str, NodeSample] = {}
    for path in _files(folder):
        samples = parse_samples(last_lines(path, most_bytes=_FIRST_BYTES)[-2:])
        if samples and now_s - samples[-1].time_s <= within_s:
            newest[samples[-1].node] = samples[-1]
    return newest


def parse_samples(lines: Iterable[bytes]) -> list[NodeSample]:
    """Parse lines of samples, in order; what is none is left out."""
    samples = []
    for line in lines:
        try:
            samples.append(NodeSample.model_validate_json(line))
        except ValidationError:
            continue
    return samples


def _read_back(path: Path, *, since_s: float, most_bytes: int) -> list[NodeSample]:
    """Read a file from its end until a sample is older than asked for."""
    try:
        size = os.stat(path).st_size
    except FileNotFoundError:
        return []
    num_bytes = _FIRST_BYTES
    while True:
        num_bytes = min(num_bytes, most_bytes)
        lines = last_lines(path, most_bytes=num_bytes)
        first = parse_samples(lines[:1])
        if num_bytes >= min(size, most_bytes) or (first and first[0].time_s < since_s):
            return parse_samples(lines)
        num_bytes *= 4


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.jsonl"))
