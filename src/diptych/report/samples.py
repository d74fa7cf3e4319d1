"""In: shards, sample costs and the processor. Out: a few samples of each source, as rows of tokens.

The choice is by hash, not by eye. Samples that no batch can take are shown beside the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from diptych.core.errors import DiptychError
from diptych.core.records import Manifest, ProcessorInfo, Shard
from diptych.data.chat import ChatTokenizer
from diptych.data.costs import Costs, load_costs
from diptych.data.measure import costs_path
from diptych.data.processor import read_processor_info
from diptych.data.shards.reader import ShardReader, StoredSample
from diptych.report.pictures import thumbnail
from diptych.report.tokens import Piece, split_row

OK = "ok"
NUM_PER_SOURCE = 3
NUM_UNUSABLE = 2
"""Samples of a source and status that no batch can take."""
MAX_SOURCES = 12
MAX_PICTURES = 6
MAX_PIECES = 600
MAX_CHARS = 2_000


@dataclass(frozen=True)
class ShownSample:
    """A sample as training reads it.

    Attributes:
        key: the sample's.
        source: its source.
        split: 'train' or 'heldout'.
        status: 'ok', or why no batch can take it.
        pictures: a data URI for each image, None for one that cannot be decoded; not more than
            `MAX_PICTURES`.
        num_images: all of the sample's images.
        pieces: its row, cut after `MAX_PIECES`; of one that cannot be encoded, its text.
        num_hidden: pieces that were cut off.
        num_tokens: of the whole row, and likewise the next two.
        num_label_tokens: tokens that are learnt.
        num_image_tokens: tokens that images are.
        problem: why it cannot be encoded.
    """

    key: str
    source: str
    split: str
    status: str
    pictures: tuple[str | None, ...] = ()
    num_images: int = 0
    pieces: tuple[Piece, ...] = ()
    num_hidden: int = 0
    num_tokens: int = 0
    num_label_tokens: int = 0
    num_image_tokens: int = 0
    problem: str = ""


def choose_samples(
    manifest: Manifest, *, shards: Path, processor: Path, sample_costs: Path
) -> list[ShownSample]:
    """Choose samples of every source and read them as training does.

    Args:
        manifest: names the shards.
        shards: the folder they lie in.
        processor: the processor's folder.
        sample_costs: the folder of every sample's costs and status.

    Returns:
        Source by source (at most `MAX_SOURCES`), usable ones first. A source that has training
        samples shows none that are held out.
    """
    tokenizer, info = ChatTokenizer(processor), read_processor_info(processor)
    shown: list[ShownSample] = []
    sources = set(manifest.sources[:MAX_SOURCES])
    for split in ("train", "heldout"):
        reader = ShardReader(shards, manifest=manifest, split=split)
        costs = load_costs(sample_costs, manifest=manifest, split=split)
        listed = [shard for shard in manifest.shards if shard.split == split]
        for place, shard in _draw(listed, sources=sources, costs=costs):
            table = pq.read_table(sample_costs / costs_path(shard), columns=["key", "status"])
            first = int(costs.shard_starts[place])
            for row, status in _choose(table):
                try:
                    stored = reader.read(first + row)
                except DiptychError as error:
                    key = table["key"][row].as_py()
                    bare = ShownSample(key, shard.source, split, status, problem=str(error))
                    shown.append(bare)
                else:
                    shown.append(_show(stored, status=status, tokenizer=tokenizer, info=info))
        sources -= {shard.source for shard in listed}
    order = {source: place for place, source in enumerate(manifest.sources)}
    return sorted(shown, key=lambda sample: (order[sample.source], sample.status != OK))


def _draw(
    listed: Sequence[Shard], *, sources: set[str], costs: Costs
) -> Iterator[tuple[int, Shard]]:
    """Yield a shard of each source, and another one if only that has unusable samples.

    The order is that of hashes, with those shards first that hold usable samples.
    """
    num_usable = costs.summary["ok"]
    num_unusable = costs.summary["num_samples"] - num_usable
    drawn: dict[tuple[str, bool], int] = {}
    for place in sorted(range(len(listed)), key=lambda place: _hash(listed[place].path)):
        if listed[place].source not in sources:
            continue
        for is_usable, counts in ((True, num_usable), (False, num_unusable)):
            if counts[place]:
                drawn.setdefault((listed[place].source, is_usable), place)
    for place in dict.fromkeys(drawn.values()):
        yield place, listed[place]


def _choose(table: pa.Table) -> list[tuple[int, str]]:
    """Return some rows of a shard, with their status: by hash of the key, a few of each status."""
    keys, statuses = table["key"].to_pylist(), table["status"].to_pylist()
    taken: Counter[str] = Counter()
    chosen = []
    for row in sorted(range(len(keys)), key=lambda row: _hash(keys[row])):
        status = statuses[row]
        if taken[status] < (NUM_PER_SOURCE if status == OK else NUM_UNUSABLE):
            taken[status] += 1
            chosen.append((row, status))
    return chosen


def _show(
    stored: StoredSample, *, status: str, tokenizer: ChatTokenizer, info: ProcessorInfo
) -> ShownSample:
    """Put one sample's pictures and tokens together."""
    sample = stored.sample
    shown = ShownSample(
        key=sample.key,
        source=sample.source,
        split=sample.split,
        status=status,
        pictures=tuple(thumbnail(data) for data in stored.images[:MAX_PICTURES]),
        num_images=len(stored.images),
    )
    sizes = [(image.width_px, image.height_px) for image in sample.images]
    try:
        row, pieces = split_row(sample.messages, images_wh=sizes, tokenizer=tokenizer, info=info)
    except DiptychError as error:
        text = "\n".join(f"{message.role}: {message.text}" for message in sample.messages)
        return replace(shown, problem=str(error), pieces=(Piece(text[:MAX_CHARS], "given"),))
    return replace(
        shown,
        pieces=tuple(pieces[:MAX_PIECES]),
        num_hidden=max(len(pieces) - MAX_PIECES, 0),
        num_tokens=len(row.input_ids),
        num_label_tokens=row.num_label_tokens,
        num_image_tokens=row.num_image_tokens,
    )


def _hash(text: str) -> bytes:
    return xxhash.xxh3_64_digest(text.encode())
