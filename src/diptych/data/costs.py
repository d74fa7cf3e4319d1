"""What each sample costs: tokens, label tokens, patches, from text and image sizes alone.

Shards' JSON members, their indexes and the processor flow in; one Parquet table per shard flows
out, in the shard's order, with `costs.json` naming the data and the processor they belong to. No
image is decoded, and torch and transformers are unknown here.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from diptych.core.errors import DataError, FormatError
from diptych.core.files import inside, replacing_folder, write_text
from diptych.core.records import FORMAT_VERSION, Manifest, Message, ProcessorInfo, Shard
from diptych.core.tables import SAMPLE_COSTS
from diptych.data.chat import ChatTokenizer
from diptych.data.encode import encode
from diptych.data.processor import read_processor_info

COSTS_NAME = "costs.json"

_CURE_SHARDS = "Delete the shards' folder and run `kedro run --pipelines=prepare` again"
_CURE = "Run `kedro run --pipelines=prepare`, which measures the costs again"


@dataclass(frozen=True)
class Costs:
    """The costs of one split; row r of every array is sample r of the split.

    Attributes:
        manifest_sha256: the data they were measured on.
        processor_sha256: the processor they were measured with.
        split: 'train' or 'heldout'.
        num_tokens: [N] int32, text and image tokens of the row.
        num_label_tokens: [N] int32.
        num_image_tokens: [N] int32.
        num_patches: [N] int32.
        num_images: [N] int32.
        area_px: [N] int64, of all images together.
        aspect: [N] float32, width / height of the first image, 0 without one.
        shard_starts: [num_shards + 1] int64, the first row of each shard, then N.
    """

    manifest_sha256: str
    processor_sha256: str
    split: str
    num_tokens: np.ndarray
    num_label_tokens: np.ndarray
    num_image_tokens: np.ndarray
    num_patches: np.ndarray
    num_images: np.ndarray
    area_px: np.ndarray
    aspect: np.ndarray
    shard_starts: np.ndarray

    @property
    def num_samples(self) -> int:
        """Count the samples of the split."""
        return len(self.num_tokens)


def measure(manifest: Manifest, shards: Path, processor: Path, folder: str) -> Path:
    """Measure every sample's cost, and write the `sample_costs` folder.

    Args:
        manifest: names the shards.
        shards: the folder they lie in.
        processor: the processor's folder.
        folder: the folder that is written, at once or not at all.

    Raises:
        DataError: a sample cannot be encoded; it is named.
    """
    info = read_processor_info(processor)
    tokenizer = ChatTokenizer(processor)
    target = Path(folder)
    with replacing_folder(target) as partial:
        for shard in manifest.shards:
            table = _measure_shard(shard, shards=shards, tokenizer=tokenizer, info=info)
            path = partial / _costs_path(shard)
            path.parent.mkdir(parents=True, exist_ok=True)
            pq.write_table(table, path)
        identity = {
            "version": FORMAT_VERSION,
            "manifest_sha256": manifest.sha256,
            "processor_sha256": info.sha256,
        }
        text = json.dumps(identity, indent=2, sort_keys=True)
        write_text(partial / COSTS_NAME, text=text + "\n")
    return target


def load_costs(
    folder: Path, *, manifest: Manifest, split: str, processor_sha256: str | None = None
) -> Costs:
    """Read a split's costs.

    Args:
        folder: the `sample_costs` folder.
        manifest: the data that they must have been measured on.
        split: 'train' or 'heldout'.
        processor_sha256: the processor that they must have been measured with; None: any.

    Raises:
        FormatError: they were measured on other data or with another processor, or are damaged.
    """
    identity = _read_identity(folder)
    expected = {"version": FORMAT_VERSION, "manifest_sha256": manifest.sha256}
    if processor_sha256 is not None:
        expected["processor_sha256"] = processor_sha256
    for name, value in expected.items():
        if identity.get(name) != value:
            raise FormatError(
                f"The sample costs in '{folder}' have {name} {identity.get(name)}",
                allowed=f"These shards and this processor have {name} {value}",
                cure=_CURE,
            )
    listed = [shard for shard in manifest.shards if shard.split == split]
    tables = [_read_table(folder, shard=shard) for shard in listed]
    table = pa.concat_tables(tables) if tables else SAMPLE_COSTS.empty_table()
    columns = {
        field.name: np.ascontiguousarray(table[field.name].to_numpy())
        for field in SAMPLE_COSTS
        if field.name != "key"
    }
    starts = np.cumsum([0, *(shard.num_samples for shard in listed)], dtype=np.int64)
    return Costs(
        manifest_sha256=manifest.sha256,
        processor_sha256=identity["processor_sha256"],
        split=split,
        shard_starts=starts,
        **columns,
    )


def _measure_shard(
    shard: Shard, *, shards: Path, tokenizer: ChatTokenizer, info: ProcessorInfo
) -> pa.Table:
    columns = ["key", "offsets", "lengths", "widths_px", "heights_px"]
    index = pq.read_table(inside(shard.index_path, folder=shards), columns=columns)
    rows = []
    file = os.open(inside(shard.path, folder=shards), os.O_RDONLY)
    try:
        for entry in index.to_pylist():
            # The JSON member is a sample's last.
            data = os.pread(file, entry["lengths"][-1], entry["offsets"][-1])
            rows.append(_measure_sample(data, entry=entry, tokenizer=tokenizer, info=info))
    finally:
        os.close(file)
    return pa.Table.from_pylist(rows, schema=SAMPLE_COSTS)


def _measure_sample(
    data: bytes, *, entry: dict[str, Any], tokenizer: ChatTokenizer, info: ProcessorInfo
) -> dict[str, Any]:
    try:
        messages = [Message(**message) for message in json.loads(data)["messages"]]
    except (ValueError, KeyError, TypeError) as error:
        raise FormatError(
            f"The sample '{entry['key']}' is damaged in its shard: {error}", cure=_CURE_SHARDS
        ) from error
    sizes = list(zip(entry["widths_px"], entry["heights_px"], strict=True))
    try:
        encoded = encode(messages, images_wh=sizes, tokenizer=tokenizer, info=info)
    except DataError as error:
        raise DataError(
            f"The sample '{entry['key']}' cannot be encoded: {error.found}",
            allowed=error.allowed,
            cure=error.cure,
        ) from error
    return {
        "key": entry["key"],
        "num_tokens": len(encoded.input_ids),
        "num_label_tokens": encoded.num_label_tokens,
        "num_image_tokens": encoded.num_image_tokens,
        "num_patches": encoded.num_patches,
        "num_images": len(sizes),
        "area_px": sum(width * height for width, height in sizes),
        "aspect": sizes[0][0] / sizes[0][1] if sizes else 0.0,
    }


def _costs_path(shard: Shard) -> str:
    return str(Path(shard.path).with_suffix(".parquet"))


def _read_identity(folder: Path) -> dict[str, Any]:
    path = folder / COSTS_NAME
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise FormatError(f"There is no file '{path}'", cure=_CURE) from error
    except json.JSONDecodeError as error:
        raise FormatError(f"'{path}' is damaged: {error}", cure=_CURE) from error


def _read_table(folder: Path, *, shard: Shard) -> pa.Table:
    path = inside(_costs_path(shard), folder=folder)
    try:
        table = pq.read_table(path, schema=SAMPLE_COSTS)
    except (OSError, pa.ArrowException) as error:
        raise FormatError(f"'{path}' cannot be read: {error}", cure=_CURE) from error
    if table.num_rows != shard.num_samples:
        raise FormatError(
            f"'{path}' has {table.num_rows} rows",
            allowed=f"The shard has {shard.num_samples} samples",
            cure=_CURE,
        )
    return table
