"""The columns of every table that crosses folders."""

from __future__ import annotations

import pyarrow as pa

SAMPLE_INDEX = pa.schema(
    [
        ("key", pa.string()),  # unique, '<source>/<id>'
        ("source", pa.string()),
        ("split", pa.string()),  # 'train' or 'heldout'
        ("messages", pa.string()),  # JSON list of {role, text}
        ("kinds", pa.list_(pa.string())),  # one word per assistant turn, or empty
        ("image_paths", pa.list_(pa.string())),  # relative to the source's image folder
        ("image_formats", pa.list_(pa.string())),  # 'jpeg', 'png', ...
        ("widths_px", pa.list_(pa.int32())),  # after EXIF rotation
        ("heights_px", pa.list_(pa.int32())),
        ("text_bytes", pa.int64()),
        ("content_sha256", pa.string()),  # over messages and image bytes
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
        ("image_path", pa.string()),  # or null
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
        ("content_sha256", pa.string()),
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
