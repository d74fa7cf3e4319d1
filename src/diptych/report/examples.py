"""In: predictions and shards. Out: `examples`, a few right and wrong answers with their images.

The choice is by hash, not by eye: whoever looks at the page sees an ordinary sample of each
outcome, spread over the question kinds.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, zip_longest
from pathlib import Path

import pyarrow as pa
import xxhash

from diptych.core.records import Manifest
from diptych.core.tables import PREDICTIONS
from diptych.data.shards.reader import ShardReader
from diptych.report.pictures import for_page

NUM_PER_OUTCOME = 12

EXAMPLES = pa.schema(
    [
        *PREDICTIONS,
        ("images", pa.list_(pa.binary())),  # as a browser shows them
        ("image_types", pa.list_(pa.string())),  # 'image/jpeg', 'image/png', ...
    ]
)


def pick(predictions: pa.Table, manifest: Manifest, shards: Path) -> pa.Table:
    """Pick up to `NUM_PER_OUTCOME` wrong and right answers and read their images.

    Args:
        predictions: every answer of the release, with the columns `PREDICTIONS`.
        manifest: names the shards of the held-out split.
        shards: the folder of the shards.

    Returns:
        The columns of `EXAMPLES`; wrong answers first.
    """
    rows = predictions.select(PREDICTIONS.names).to_pylist()
    chosen = [
        *_spread(row for row in rows if not row["correct"]),
        *_spread(row for row in rows if row["correct"]),
    ]
    images = _read_images({row["key"] for row in chosen}, manifest=manifest, shards=shards)
    for row in chosen:
        shown = [for_page(data) for data in images.get(row["key"], [])]
        row["image_types"] = [media_type for media_type, _ in shown]
        row["images"] = [data for _, data in shown]
    return pa.Table.from_pylist(chosen, schema=EXAMPLES)


def _spread(rows: Iterable[dict]) -> list[dict]:
    """Take rows kind by kind in turn, each kind in the order of its hashes, one per image."""
    by_kind: dict[str, list[dict]] = {}
    for row in rows:
        by_kind.setdefault(row["kind"], []).append(row)
    for kind in by_kind.values():
        kind.sort(key=_hash)
    in_turn = chain.from_iterable(zip_longest(*(by_kind[kind] for kind in sorted(by_kind))))
    chosen: list[dict] = []
    seen: set[str] = set()
    for row in in_turn:
        if row is None or (row["image_key"] and row["image_key"] in seen):
            continue
        seen.add(row["image_key"])
        chosen.append(row)
        if len(chosen) == NUM_PER_OUTCOME:
            break
    return chosen


def _hash(row: dict) -> bytes:
    return xxhash.xxh3_64_digest(f"{row['key']}\0{row['turn']}".encode())


def _read_images(keys: set[str], *, manifest: Manifest, shards: Path) -> dict[str, list[bytes]]:
    """Read the images of some held-out samples."""
    if not keys:
        return {}
    reader = ShardReader(shards, manifest=manifest, split="heldout")
    rows = [row for row, key in enumerate(reader.keys.to_pylist()) if key in keys]
    found = [reader.read(row) for row in rows]
    return {stored.sample.key: stored.images for stored in found}
