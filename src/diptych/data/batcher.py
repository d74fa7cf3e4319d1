"""Rows of a split as micro-batches: read, decode, encode, collate.

Row numbers flow in; micro-batches and the keys of samples that could not be read flow out. Which
rows belong together, and which rank asks, is unknown here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from diptych.core.errors import DataError
from diptych.core.records import Manifest, ProcessorInfo
from diptych.data.chat import ChatTokenizer
from diptych.data.collate import MicroBatch, collate, load_image_processor
from diptych.data.encode import Encoded, encode
from diptych.data.images import decode
from diptych.data.processor import read_processor_info
from diptych.data.reader import ShardReader
from diptych.data.schedule import NO_ROW

if TYPE_CHECKING:
    from transformers import BaseImageProcessor

Split = Literal["train", "heldout"]


@dataclass
class Batcher:
    """Makes micro-batches of a split's rows; opens its files when it is first used."""

    shards: Path
    manifest: Manifest
    processor: Path
    split: Split
    known_bad: frozenset[str] = frozenset()

    def make(self, rows: Sequence[int] | np.ndarray) -> tuple[MicroBatch, tuple[str, ...]]:
        """Read, decode, encode and collate rows.

        Args:
            rows: rows of the split; -1 for a row without sample.

        Returns:
            The micro-batch, and the keys of samples that were masked because they cannot be read.
        """
        encoded: list[Encoded | None] = []
        images: list[np.ndarray] = []
        masked: list[str] = []
        for row in rows:
            sample = None if row == NO_ROW else self._read_row(int(row), masked=masked)
            encoded.append(None if sample is None else sample[0])
            images += [] if sample is None else sample[1]
        batch = collate(
            encoded, images=images, image_processor=self._image_processor, info=self._info
        )
        return batch, tuple(masked)

    def open(self) -> None:
        """Read indexes and settings now: early errors, and forked workers share the memory."""
        _ = self._reader, self._info, self._tokenizer, self._image_processor

    def _read_row(self, row: int, *, masked: list[str]) -> tuple[Encoded, list[np.ndarray]] | None:
        """Return a row and its images; None, and its key in `masked`, if it cannot be read."""
        stored = self._reader.read(row)
        sample = stored.sample
        try:
            if sample.key in self.known_bad:
                raise DataError(f"The sample '{sample.key}' was masked before")
            images = [decode(data) for data in stored.images]
            sizes = [(image.shape[1], image.shape[0]) for image in images]
            if sizes != [(image.width_px, image.height_px) for image in sample.images]:
                raise DataError(f"The images of '{sample.key}' have other sizes than indexed")
            encoded = encode(
                sample.messages, images_wh=sizes, tokenizer=self._tokenizer, info=self._info
            )
        except DataError:
            masked.append(sample.key)
            return None
        return encoded, images

    @cached_property
    def _reader(self) -> ShardReader:
        return ShardReader(self.shards, manifest=self.manifest, split=self.split)

    @cached_property
    def _info(self) -> ProcessorInfo:
        return read_processor_info(self.processor)

    @cached_property
    def _tokenizer(self) -> ChatTokenizer:
        return ChatTokenizer(self.processor)

    @cached_property
    def _image_processor(self) -> BaseImageProcessor:
        return load_image_processor(self.processor)
