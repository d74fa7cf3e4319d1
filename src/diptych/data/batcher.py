"""Rows of a split as micro-batches: read, decode, cut, encode, collate.

Rows of sample numbers flow in; micro-batches and the keys of samples that could not be read flow
out. Which rows belong together, and which rank asks, is unknown here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np

from diptych.core.errors import DataError
from diptych.core.records import Manifest, ProcessorInfo
from diptych.data.chat import ChatTokenizer
from diptych.data.collate import MicroBatch, Multiples, Ready, collate
from diptych.data.encode import encode
from diptych.data.images.cache import ImageCache
from diptych.data.images.decode import decode
from diptych.data.images.features import Features
from diptych.data.images.patches import Patcher, TilePatcher, load_patcher
from diptych.data.processor import read_processor_info
from diptych.data.schedule.ragged import Rows
from diptych.data.shards.reader import ShardReader, StoredSample
from diptych.shape.families import family

Split = Literal["train", "heldout"]


@dataclass(kw_only=True)
class Batcher:
    """Makes micro-batches of a split's rows; opens its files when it is first used.

    Attributes:
        shards: the shards' folder, or its URL.
        manifest: names the shards.
        processor: the processor's folder.
        split: which samples.
        row_tokens: None where each row is one sample; else what every row is padded to.
        known_bad: keys of samples that were masked before.
        image_cache: a folder on a local disk that keeps cut images; None: they are not kept.
        image_cache_bytes: how much it may hold.
        features: what a frozen vision tower made of the images, read instead of them; None: images.
        multiples: what lengths of rows and numbers of patches are multiples of.
    """

    shards: Path | str
    manifest: Manifest
    processor: Path
    split: Split
    row_tokens: int | None = None
    known_bad: frozenset[str] = frozenset()
    image_cache: Path | None = None
    image_cache_bytes: int = 0
    features: Features | None = None
    multiples: Multiples = field(default_factory=Multiples)

    def make(self, rows: Rows) -> tuple[MicroBatch, tuple[str, ...]]:
        """Read, decode, encode and collate rows.

        Args:
            rows: samples of the split; an empty row becomes padding.

        Returns:
            The micro-batch, and the keys of samples that were masked because they cannot be read:
            they are absent from their rows.
        """
        masked: list[str] = []
        ready = [
            [
                sample
                for number in row.tolist()
                if (sample := self._prepare(number, masked=masked)) is not None
            ]
            for row in rows
        ]
        batch = collate(
            ready,
            patcher=self.features or self._patcher,
            info=self._info,
            num_sources=len(self._sources),
            row_tokens=self.row_tokens,
            multiples=self.multiples,
        )
        return batch, tuple(masked)

    def cut(self, stored: StoredSample) -> tuple[np.ndarray, ...]:
        """Return each image's patches, from the cache where it has them.

        Raises:
            DataError: an image is damaged, or has another size than its record says.
        """
        patches = []
        cache = self._cache
        for data, image_hash, image in zip(
            stored.images, stored.image_hashes, stored.sample.images, strict=True
        ):
            name = image_hash
            if self._patcher.cuts_by_number and len(stored.images) > 1:
                name += "-several"
            found = cache.get(name) if cache else None
            if found is None:
                pixels = decode(data)
                if pixels.shape[:2] != (image.height_px, image.width_px):
                    raise DataError(
                        f"The images of '{stored.sample.key}' have other sizes than indexed"
                    )
                found = self._patcher.cut(pixels, num_images=len(stored.images))
                if cache:
                    cache.put(name, patches=found)
            patches.append(found)
        return tuple(patches)

    @property
    def is_remote(self) -> bool:
        """Tell whether the shards lie behind a URL, so that `expect` saves time."""
        return self._reader.is_remote

    def expect(self, rows: Sequence[Rows]) -> None:
        """Begin to fetch the samples that will be asked for from now on."""
        self._reader.expect(row for part in rows for row in part.samples.tolist())

    def open(self) -> None:
        """Read settings now: early errors, and forked workers share the memory.

        Raises:
            LayoutError: no filler image has a multiple of so many patches.
        """
        self.multiples.check(unit=family(self._info.family).unit_rows(self._info.image))
        _ = self._reader, self._info, self._tokenizer, self._patcher, self._cache

    def _prepare(self, number: int, *, masked: list[str]) -> Ready | None:
        """Return a sample ready for its row; None, and its key in `masked`, if it is bad."""
        stored = self._reader.read(number)
        sample = stored.sample
        try:
            if sample.key in self.known_bad:
                raise DataError(f"The sample '{sample.key}' was masked before")
            stored.check()
            encoded = encode(
                sample.messages,
                images_wh=[(image.width_px, image.height_px) for image in sample.images],
                tokenizer=self._tokenizer,
                info=self._info,
            )
            patches = self._read_features(stored) if self.features else self.cut(stored)
        except DataError:
            masked.append(sample.key)
            return None
        return Ready(encoded=encoded, patches=patches, source=self._sources[sample.source])

    def _read_features(self, stored: StoredSample) -> tuple[np.ndarray, ...]:
        """Return each image's features; one without any could not be decoded."""
        assert self.features is not None, "features are asked for"
        found = [self.features.get(image_hash) for image_hash in stored.image_hashes]
        if any(features is None for features in found):
            raise DataError(f"An image of '{stored.sample.key}' has no features")
        return tuple(features for features in found if features is not None)

    @cached_property
    def _reader(self) -> ShardReader:
        return ShardReader(self.shards, manifest=self.manifest, split=self.split)

    @cached_property
    def _sources(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.manifest.sources)}

    @cached_property
    def _info(self) -> ProcessorInfo:
        return read_processor_info(self.processor)

    @cached_property
    def _tokenizer(self) -> ChatTokenizer:
        return ChatTokenizer(self.processor)

    @cached_property
    def _patcher(self) -> Patcher | TilePatcher:
        return load_patcher(self.processor, image=self._info.image)

    @cached_property
    def _cache(self) -> ImageCache | None:
        if self.image_cache is None or self.image_cache_bytes <= 0:
            return None
        return ImageCache(
            self.image_cache,
            max_bytes=self.image_cache_bytes,
            maker_sha256=self._info.sha256,
        )
