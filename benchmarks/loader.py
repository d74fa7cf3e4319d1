"""From shards to tensors on one core: photographs of 640 x 480 in batches of `BATCH`.

All make the same pixel values, bitwise, with Qwen3-VL's patches (16 px, merge 2, two frames); that
is checked. `ours` is the Loader as training runs it, without worker processes: it also reads each
sample's JSON, checks its content hash, renders the chat, tokenizes, labels, lays out positions and
pads, which none of the others does. The others:

- `ours_images`: what ours does for the images alone, as the peers do: read, checked, decoded, cut.
- `ceiling`: the raw decode ceiling. JPEGs lie in memory as bytes; simplejpeg decodes each, and our
  own `Patcher` resizes, cuts and normalises them, in the same batches, in the same order. Nothing
  is read, nothing parsed: a loop of three lines.
- `ceiling_transformers`: the same loop with transformers' image processor instead of ours.
- `webdataset`: `webdataset.WebDataset` over the same tars, simplejpeg, transformers' processor.
- `webdataset_pillow`: the same with its own `decode("pil")`, the usual way.

CPU seconds of the process, one thread. All take turns of one batch over the same samples, so that
what else the machine does meets all alike; a round is one pass. Large blocks of memory come in huge
pages for all (`THP_MEM_ALLOC_ENABLE`).
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["THP_MEM_ALLOC_ENABLE"] = "1"

import numpy as np
import simplejpeg
import torch
import webdataset

from _corpus import Corpus, make_corpus
from diptych.core.records import ScheduleSpec
from diptych.data.batcher import Batcher
from diptych.data.costs import load_costs
from diptych.data.images.patches import Patcher, load_patcher
from diptych.data.loader import Loader
from diptych.data.processor import read_processor_info
from diptych.data.schedule.schedule import Schedule
from diptych.data.shards.reader import ShardReader
from run import Measured

CEILING_GOAL, PILLOW_GOAL = 0.98, 1.5
NUM_ROUNDS = 5
BATCH = 8
NUM_BATCHES = 24

Batches = Iterator[torch.Tensor]


def measure(options: argparse.Namespace) -> Measured:
    """Run all in turns."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="diptych-loader-") as name:
        corpus = make_corpus(Path(name), num_samples=BATCH * NUM_BATCHES)
        makers = _makers(corpus)
        _check_pixels(makers)
        rounds = [_run_round(makers) for _ in range(NUM_ROUNDS)]
    rates = {
        name: statistics.median(BATCH * NUM_BATCHES / part[name] for part in rounds)
        for name in makers
    }
    to_ceiling = statistics.median(part["ceiling"] / part["ours"] for part in rounds)
    images_to_ceiling = statistics.median(part["ceiling"] / part["ours_images"] for part in rounds)
    to_pillow = statistics.median(part["webdataset_pillow"] / part["ours"] for part in rounds)
    return Measured(
        unit="images per CPU-second",
        ours=rates.pop("ours"),
        peers=rates,
        ratio=to_ceiling,
        goal=f"at least {CEILING_GOAL} of the ceiling, and at least {PILLOW_GOAL} times "
        f"webdataset with Pillow (here {to_pillow:.2f}); images alone reach "
        f"{images_to_ceiling:.2f} of the ceiling",
        met=to_ceiling >= CEILING_GOAL and to_pillow >= PILLOW_GOAL,
        raw={
            "cpu_s": rounds,
            "num_images": BATCH * NUM_BATCHES,
            "images_to_ceiling": images_to_ceiling,
            "to_pillow": to_pillow,
        },
    )


def _run_round(makers: dict[str, Callable[[], Batches]]) -> dict[str, float]:
    """Let all make one batch each in turns; return each one's CPU seconds."""
    running = {name: make() for name, make in makers.items()}
    spent = dict.fromkeys(makers, 0.0)
    for batches in running.values():
        next(batches)
    for _ in range(NUM_BATCHES - 1):
        for name, batches in running.items():
            began = time.process_time()
            pixels_PD = next(batches)
            del pixels_PD
            spent[name] += time.process_time() - began
    return {name: seconds * NUM_BATCHES / (NUM_BATCHES - 1) for name, seconds in spent.items()}


def _makers(corpus: Corpus) -> dict[str, Callable[[], Batches]]:
    costs = load_costs(corpus.sample_costs, manifest=corpus.manifest, split="train")
    spec = ScheduleSpec(global_batch=BATCH, group=BATCH, max_row_tokens=1 << 16)
    schedule = Schedule(costs, buckets=corpus.buckets, spec=spec)
    reader = ShardReader(corpus.shards, manifest=corpus.manifest, split="train")
    order = [schedule.rows(0, number).samples for number in range(NUM_BATCHES)]
    jpegs = [[reader.read_members(sample)[0] for sample in batch.tolist()] for batch in order]
    patcher = load_patcher(corpus.processor, image=read_processor_info(corpus.processor).image)
    processor = _image_processor(corpus.processor)

    def ours() -> Batches:
        loader = Loader(
            shards=corpus.shards,
            manifest=corpus.manifest,
            processor=corpus.processor,
            schedule=schedule,
            split="train",
            rank=0,
            world_size=1,
            micro_batch=BATCH,
            num_workers=0,
        )
        for batch in loader:
            yield batch.micro_batches[0].pixel_values_PD

    batcher = Batcher(
        shards=corpus.shards, manifest=corpus.manifest, processor=corpus.processor, split="train"
    )

    def ours_images() -> Batches:
        for batch in order:
            stored = [reader.read(sample) for sample in batch.tolist()]
            for sample in stored:
                sample.check()
            yield patcher.normalise([part for one in stored for part in batcher.cut(one)])

    def tars(decode: Callable[[Any], Any]) -> Batches:
        samples = decode(webdataset.WebDataset(corpus.tars, shardshuffle=False))
        images = []
        for sample in samples:
            images.append(sample["0.jpg"])
            if len(images) == BATCH:
                yield _process(processor, images=images)
                images = []

    return {
        "ours": ours,
        "ours_images": ours_images,
        "ceiling": lambda: (_cut(patcher, jpegs=batch) for batch in jpegs),
        "ceiling_transformers": lambda: (
            _process(processor, images=[_decode(data) for data in batch]) for batch in jpegs
        ),
        "webdataset": lambda: tars(lambda data: data.map_dict(**{"0.jpg": _decode})),
        "webdataset_pillow": lambda: tars(lambda data: data.decode("pil")),
    }


def _decode(data: bytes) -> np.ndarray:
    return simplejpeg.decode_jpeg(data, colorspace="RGB")


def _cut(patcher: Patcher, *, jpegs: list[bytes]) -> torch.Tensor:
    return patcher.normalise([patcher.cut(_decode(data)) for data in jpegs])


def _image_processor(folder: Path) -> Any:
    from transformers import AutoImageProcessor

    return AutoImageProcessor.from_pretrained(folder, local_files_only=True)


def _process(processor: Any, *, images: list[Any]) -> torch.Tensor:
    return processor(images, return_tensors="pt")["pixel_values"]


def _check_pixels(makers: dict[str, Callable[[], Batches]]) -> None:
    """See that ours are those of the same files in transformers' hands, and the peers' their own.

    The peers read in the tars' order, so their first batch is held against the other's.
    """
    for one, other in (
        ("ours", "ours_images"),
        ("ours", "ceiling"),
        ("ceiling", "ceiling_transformers"),
        ("webdataset", "webdataset_pillow"),
    ):
        for _, *pair in zip(range(2), makers[one](), makers[other](), strict=False):
            if not torch.equal(*pair):
                raise AssertionError(f"'{one}' and '{other}' make other pixels")
