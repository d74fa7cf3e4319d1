"""Measure one shard: what each sample costs, from its text and its images' sizes alone.

A shard's JSON members, its index and the processor flow in; one Parquet table in the shard's order
flows out, and one row that sums it up. No image is decoded, and torch and transformers are unknown
here. What many shards make together is `data/costs.py`'s business.
"""

from __future__ import annotations

import functools
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from diptych.core.errors import DataError, DiptychError
from diptych.core.files import inside
from diptych.core.records import IMAGE_PLACEHOLDER, Message, ProcessorInfo, Shard
from diptych.core.tables import SAMPLE_COSTS
from diptych.data.chat import ChatTokenizer
from diptych.data.encode import encode
from diptych.data.processor import read_processor_info

STATUSES = {
    "ok": "a batch can take it",
    "no_label": "no token of it is learnt: no assistant has said anything",
    "special_token": "a text holds a special token of images",
    "unencodable": "the chat template refuses it, or placeholders and images differ in number",
    "damaged": "its JSON member cannot be read",
}
"""What a sample's `status` says."""

SUMMED = (
    "num_tokens",
    "squared_tokens",
    "num_label_tokens",
    "num_image_tokens",
    "num_patches",
)
LARGEST = ("max_tokens", "max_patches")

SUMMARY = pa.schema(
    [
        ("path", pa.string()),  # the shard's
        ("num_samples", pa.int64()),
        *((status, pa.int64()) for status in STATUSES),  # how many samples have it
        *((name, pa.int64()) for name in (*SUMMED, *LARGEST)),  # over those that are 'ok'
    ]
)
"""The columns of `summary.parquet`: one row per shard."""

_NOT_MEASURED = {field.name: 0 for field in SAMPLE_COSTS if field.name not in ("key", "status")}


@dataclass(frozen=True)
class ShardTask:
    """One shard to measure.

    Attributes:
        shard: which one.
        shards: the folder it lies in.
        processor: the processor's folder.
        folder: where its table is written.
    """

    shard: Shard
    shards: Path
    processor: Path
    folder: Path


def measure_shard(task: ShardTask) -> dict[str, Any]:
    """Write a shard's table, and return its row of `SUMMARY`."""
    tokenizer, info = _load_processor(task.processor)
    columns = ["key", "offsets", "lengths", "widths_px", "heights_px"]
    index = pq.read_table(inside(task.shard.index_path, folder=task.shards), columns=columns)
    rows = []
    file = os.open(inside(task.shard.path, folder=task.shards), os.O_RDONLY)
    try:
        for entry in index.to_pylist():
            # The JSON member is a sample's last.
            data = os.pread(file, entry["lengths"][-1], entry["offsets"][-1])
            rows.append(measure_sample(data, entry=entry, tokenizer=tokenizer, info=info))
    finally:
        os.close(file)
    table = pa.Table.from_pylist(rows, schema=SAMPLE_COSTS)
    path = task.folder / costs_path(task.shard)
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path)
    return summarize(table, path=task.shard.path)


def measure_sample(
    data: bytes, *, entry: dict[str, Any], tokenizer: ChatTokenizer, info: ProcessorInfo
) -> dict[str, Any]:
    """Measure one sample.

    Args:
        data: its JSON member.
        entry: its row of the shard's index.
        tokenizer: the processor's.
        info: the processor's.

    Returns:
        One row of SAMPLE_COSTS.
    """
    sizes = list(zip(entry["widths_px"], entry["heights_px"], strict=True))
    row = {"key": entry["key"], **_NOT_MEASURED}
    try:
        messages = [Message(**message) for message in json.loads(data)["messages"]]
    except (ValueError, KeyError, TypeError):
        return row | {"status": "damaged"}
    try:
        encoded = encode(messages, images_wh=sizes, tokenizer=tokenizer, info=info)
    except DiptychError as error:
        num_placeholders = sum(message.text.count(IMAGE_PLACEHOLDER) for message in messages)
        typed = isinstance(error, DataError) and num_placeholders == len(sizes)
        return row | {"status": "special_token" if typed else "unencodable"}
    return row | {
        "num_tokens": len(encoded.input_ids),
        "num_label_tokens": encoded.num_label_tokens,
        "num_image_tokens": encoded.num_image_tokens,
        "num_patches": encoded.num_patches,
        "num_images": len(sizes),
        "area_px": sum(width * height for width, height in sizes),
        "aspect": sizes[0][0] / sizes[0][1] if sizes else 0.0,
        "status": "ok" if encoded.num_label_tokens else "no_label",
    }


def summarize(table: pa.Table, *, path: str) -> dict[str, Any]:
    """Sum up a shard's costs.

    Args:
        table: SAMPLE_COSTS.
        path: the shard's.

    Returns:
        One row of `SUMMARY`.
    """
    status = table["status"].to_numpy(zero_copy_only=False)
    usable = status == "ok"
    values = {
        name: table[name].to_numpy()[usable].astype(np.int64)
        for name in SUMMED
        if name != "squared_tokens"
    }
    tokens, patches = values["num_tokens"], values["num_patches"]
    return {
        "path": path,
        "num_samples": table.num_rows,
        **{name: int((status == name).sum()) for name in STATUSES},
        **{name: int(column.sum()) for name, column in values.items()},
        "squared_tokens": int((tokens**2).sum()),
        "max_tokens": int(tokens.max(initial=0)),
        "max_patches": int(patches.max(initial=0)),
    }


def costs_path(shard: Shard) -> str:
    """Return where a shard's costs lie in the `sample_costs` folder."""
    return str(Path(shard.path).with_suffix(".parquet"))


@functools.lru_cache(maxsize=1)
def _load_processor(folder: Path) -> tuple[ChatTokenizer, ProcessorInfo]:
    return ChatTokenizer(folder), read_processor_info(folder)
