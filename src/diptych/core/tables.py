"""The columns of every table that crosses folders."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

SAMPLE_INDEX = pa.schema(
    [
        ("key", pa.string()),  # unique, '<source>/<id>'
        ("source", pa.string()),
        ("split", pa.string()),  # 'train' or 'heldout'
        ("messages", pa.string()),  # JSON list of {role, text}
        ("kinds", pa.list_(pa.string())),  # one word per assistant turn, or empty
        ("image_names", pa.list_(pa.string())),  # as the source calls them
        (
            "image_files",
            pa.list_(pa.string()),
        ),  # where the bytes are: data/sources/blobs.py
        ("image_offsets", pa.list_(pa.int64())),  # byte in a tar, row of a table, -1: whole file
        ("image_lengths", pa.list_(pa.int64())),  # bytes
        ("image_formats", pa.list_(pa.string())),  # 'jpeg', 'png', ...
        ("widths_px", pa.list_(pa.int32())),  # after EXIF rotation
        ("heights_px", pa.list_(pa.int32())),
        ("image_hashes", pa.list_(pa.string())),  # xxh3_128 of each image's bytes, hexadecimal
        ("text_bytes", pa.int64()),
        ("content_hash", pa.string()),  # xxh3_128 over messages and image hashes
        ("status", pa.string()),  # 'ok'
    ]
)

QUARANTINE = pa.schema(
    [
        ("key", pa.string()),  # '<source>/<id>' or '<source>/line-<n>' where no id could be read
        ("source", pa.string()),
        ("reason", pa.string()),  # a code of data.index.REASONS
        ("value", pa.string()),  # the offending value, cut at 200 characters
        ("detail", pa.string()),  # one sentence for a person
        ("image_path", pa.string()),  # the image's name in its source, or null
        ("image_file", pa.string()),  # where its bytes lie, as in SAMPLE_INDEX; or null
        ("image_offset", pa.int64()),
        ("image_length", pa.int64()),
    ]
)

SHARD_INDEX = pa.schema(
    [
        ("key", pa.string()),
        ("member_names", pa.list_(pa.string())),
        ("offsets", pa.list_(pa.int64())),  # of the member's data, in bytes from the tar's start
        ("lengths", pa.list_(pa.int64())),
        ("widths_px", pa.list_(pa.int32())),
        ("heights_px", pa.list_(pa.int32())),
        ("text_bytes", pa.int64()),
        ("content_hash", pa.string()),
    ]
)

SAMPLE_COSTS = pa.schema(
    [
        ("key", pa.string()),
        ("num_tokens", pa.int32()),  # text and image tokens of the row
        ("num_label_tokens", pa.int32()),
        ("num_image_tokens", pa.int32()),
        ("num_patches", pa.int32()),
        ("num_images", pa.int32()),
        ("area_px", pa.int64()),  # of all images together
        ("aspect", pa.float32()),  # width / height of the first image, 0 without image
        ("status", pa.string()),  # 'ok', or why no batch can take it: a code of data.costs.STATUSES
    ]
)

PREDICTIONS = pa.schema(
    [
        ("key", pa.string()),
        ("turn", pa.int32()),  # index among the sample's assistant turns
        ("kind", pa.string()),
        ("bucket", pa.int32()),
        ("question", pa.string()),
        ("answer", pa.string()),
        ("prediction", pa.string()),
        ("blind_prediction", pa.string()),
        ("correct", pa.bool_()),
        ("blind_correct", pa.bool_()),
        ("image_key", pa.string()),  # bootstrap unit: the content of the sample's images
    ]
)


def read_parts(folder: Path, *, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
    """Read a folder of Parquet files, such as `sample_index`, one file at a time, in name order.

    Args:
        folder: The folder; its files may lie deeper.
        columns: Which columns; None takes all.
    """
    for path in sorted(folder.rglob("*.parquet")):
        yield pq.ParquetFile(path).read(columns=columns)
