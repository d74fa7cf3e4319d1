"""Records of `prepare`: from raw samples to shards and the processor."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from diptych.core.hashing import sha256_json
from diptych.core.records.base import FORMAT_VERSION, Record

IMAGE_PLACEHOLDER = "<image>"
"""What stands in a message's text where the sample's next image goes."""


class RawPart(Record):
    """One file of a source: annotations, or a table or tar that holds the images too.

    `path` is relative to the source's root. `stamp` notices a change: 'sha256:' and the hash of a
    small local file, 'stat:' and the time of a large one, 'etag:' and the tag of a remote one. A
    long file of lines is cut into parts: the lines that begin in [start, end) bytes.
    """

    path: str
    num_bytes: int
    stamp: str
    start: int = 0
    end: int | None = None


class RawSource(Record):
    """One named set of samples: its parts, and the folder or URL that its images are below.

    `columns` says which column (of Parquet, CSV) or member (of tars) holds what. `repeat` is how
    often an epoch takes each sample.
    """

    name: str
    kind: Literal["llava", "parquet", "csv", "webdataset"]
    split: Literal["train", "heldout"] | None = None
    heldout_fraction: float = 0.0
    repeat: float = 1.0
    root: str
    images: str
    image_urls: Literal["refuse", "fetch"] = "refuse"
    parts: tuple[RawPart, ...]
    columns: dict[str, str] = Field(default_factory=dict)
    prompt: str | None = None
    listing_sha256: str | None = None
    num_image_files: int | None = None


class RawSamples(Record):
    """`raw_samples`: what the user has, and enough of a digest to notice a change."""

    sources: tuple[RawSource, ...]


class Message(Record):
    """One turn; `<image>` in the text stands for the next image of the sample."""

    role: Literal["system", "user", "assistant"]
    text: str


class ImageRef(Record):
    """One image of a sample; width and height are those after EXIF rotation."""

    path: str
    width_px: int
    height_px: int
    format: str


class Sample(Record):
    """One conversation with its images; `kinds` has one word per assistant turn (or is empty)."""

    key: str
    source: str
    split: Literal["train", "heldout"]
    messages: tuple[Message, ...]
    images: tuple[ImageRef, ...]
    kinds: tuple[str, ...] = ()


class Buckets(Record):
    """`buckets`: the boundaries of image area and aspect; sample -> bucket is arithmetic.

    Bucket 0 is text only. With areas cut at `areas_px` (ascending) and aspects (width / height) at
    `aspects`, an image sample is in bucket `1 + area_class * (len(aspects) + 1) + aspect_class`.
    """

    areas_px: tuple[int, ...]
    aspects: tuple[float, ...]


class Shard(Record):
    """One tar and its index; paths are relative to the shards folder."""

    path: str
    index_path: str
    split: Literal["train", "heldout"]
    source: str
    num_samples: int
    num_images: int
    num_bytes: int
    sha256: str
    index_sha256: str


class Manifest(Record):
    """`manifest`: the shards and their hashes. Its own hash is the data's identity.

    `quarantined` counts refused samples by source, then by reason.
    """

    version: int = FORMAT_VERSION
    shards: tuple[Shard, ...]
    quarantined: dict[str, dict[str, int]]

    @property
    def sha256(self) -> str:
        """The data's identity: nothing about a tokenizer is in it."""
        return sha256_json(self.model_dump(mode="json"))

    @property
    def num_quarantined(self) -> int:
        """Count the refused samples of all sources."""
        return sum(sum(reasons.values()) for reasons in self.quarantined.values())

    @property
    def quarantined_by_reason(self) -> dict[str, int]:
        """Count the refused samples of all sources by reason."""
        counts: dict[str, int] = {}
        for reasons in self.quarantined.values():
            for reason, count in reasons.items():
                counts[reason] = counts.get(reason, 0) + count
        return dict(sorted(counts.items()))

    @property
    def sources(self) -> tuple[str, ...]:
        """Name the sources of the shards, each once, in the manifest's order."""
        return tuple(dict.fromkeys(shard.source for shard in self.shards))

    def num_samples(self, split: str) -> int:
        """Count a split's samples."""
        return sum(shard.num_samples for shard in self.shards if shard.split == split)


class ImageSettings(Record):
    """How a processor cuts an image of any size into a grid of patches; pixel bounds are areas."""

    kind: Literal["native"] = "native"
    patch_px: int
    merge: int
    temporal_patch: int
    min_area_px: int
    max_area_px: int


class TileSettings(Record):
    """How a processor cuts an image into square tiles of one size.

    A tile has `tile_tokens` tokens. Between `min_tiles` and `max_tiles` are cut where the family
    cuts; `thumbnail` adds the whole image where there are several. `resolutions` are the (height,
    width) in px that an image may be fitted into, and then `max_tiles` bounds its tokens.
    `max_side_px` is what its longer side is scaled to.

    In a rendered conversation `placeholder` stands for an image; `before`, one `token` for each of
    its tokens, and `after` take its place.
    """

    kind: Literal["tiles"] = "tiles"
    side_px: int
    patch_px: int
    tile_tokens: int
    min_tiles: int = 1
    max_tiles: int = 1
    thumbnail: bool = False
    resolutions: tuple[tuple[int, int], ...] = ()
    max_side_px: int | None = None
    placeholder: str
    token: str
    before: str = ""
    after: str = ""


AnyImageSettings = Annotated[ImageSettings | TileSettings, Field(discriminator="kind")]


class TokenIds(Record):
    """The ids that the model's arithmetic needs; `num_tokens` is the tokenizer's size.

    None where a family has no such token.
    """

    num_tokens: int
    pad: int
    eos: int
    image: int
    video: int | None = None
    vision_start: int | None = None
    vision_end: int | None = None

    @property
    def num_embeddings(self) -> int:
        """Count the rows that an embedding needs: one for every id there is."""
        named = self.model_dump(exclude={"num_tokens"}).values()
        return max(self.num_tokens, 1 + max(each for each in named if each is not None))


class ProcessorInfo(Record):
    """`processor.json` inside the `processor` folder: what others need to know of it."""

    version: int = FORMAT_VERSION
    family: str
    image: AnyImageSettings
    tokens: TokenIds
    sha256: str
