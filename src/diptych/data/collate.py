"""Rows as the tensors of one micro-batch.

Encoded samples with their images' patches flow in, several to a row or one; right-padded tensors
and their counts flow out, padded to few shapes where that is asked for. Which rows belong together
is unknown here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import numpy as np
import torch

from diptych.core.axes import IGNORED_LABEL
from diptych.core.errors import LayoutError
from diptych.core.records import ProcessorInfo
from diptych.data.encode import Encoded
from diptych.shape.families import family
from diptych.shape.picture import Picture

_NO_SOURCE = -1


@dataclass(frozen=True)
class Multiples:
    """What the shapes of micro-batches are multiples of, so that there are few of them.

    Attributes:
        tokens: of the length of rows.
        patches: of the number of patches, a multiple of those of one token, or of tiles; None: as
            many as the images have.
    """

    tokens: int = 1
    patches: int | None = None

    def check(self, *, unit: int) -> None:
        """Refuse a number of patches that no filler image can fill up.

        Raises:
            LayoutError: an image of whole tokens cannot have so many patches.
        """
        if self.patches is not None and self.patches % unit:
            raise LayoutError(
                f"plan.layout.memory.patch_multiple is {self.patches}",
                allowed=f"A multiple of {unit}, the patches of one image token",
                cure=f"Set it to {-(-self.patches // unit) * unit}, or to null",
            )

    def row_tokens(self, length: int) -> int:
        """Return the length of rows that hold so many tokens."""
        return -(-length // self.tokens) * self.tokens

    def num_filler_rows(self, num_rows: int, *, unit: int, least: int | None = None) -> int:
        """Count the rows of pixels that filler images add; there is always an image.

        Args:
            num_rows: of the images.
            unit: what an image's rows are a multiple of.
            least: how many a filler has at least; None: one unit.
        """
        multiple = self.patches or unit
        wanted = max(1, -(-num_rows // multiple)) * multiple
        missing = wanted - num_rows if self.patches or not num_rows else 0
        while 0 < missing < (least or unit):
            missing += multiple
        return missing

    def most_filler_rows(self, *, unit: int, least: int) -> int:
        """Return the largest of these numbers that there can be."""
        return (self.patches or unit) + least - unit


@dataclass(frozen=True, slots=True)
class Ready:
    """A sample that can take its place in a row.

    Attributes:
        encoded: its ids and labels.
        patches: [p, bytes of a patch or tile] uint8 of each image, as `Patcher.cut` or
            `Features.get` gave.
        source: index into the manifest's sources.
    """

    encoded: Encoded
    patches: tuple[np.ndarray, ...]
    source: int


@dataclass(kw_only=True)
class MicroBatch:
    """One micro-batch. Causal attention and right padding make an attention mask superfluous.

    Where rows hold several samples, each sample's positions start at 0, its first token carries no
    label, and no token may attend to one of another segment.

    Attributes:
        input_ids_BS: [B, S] int64.
        labels_BS: [B, S] int64, aligned with the ids (not shifted), -100 where nothing is learnt.
        position_ids_3BS: [3, B, S] int64; 0 at padding.
        segment_ids_BS: [B, S] int32: 0 at padding, 1 for the row's first sample, 2 for its second;
            None where each row is one sample.
        source_ids_BS: [B, S] int16: index into the manifest's sources; -1 at padding.
        pixel_values_PD: [P, D] float32, never empty: without images there is one filler. A row is
            a patch, or a tile.
        grid_thw_I3: [I, 3] int64: 1 frame, then the two numbers of `Picture.grid`.
        num_rows: rows that hold a sample.
        num_samples: samples in all rows.
        num_paired: those of them that have both an image and a label.
        num_label_tokens: labels that a shifted loss uses.
        num_text_tokens: tokens of samples that are not images'.
        num_image_tokens: tokens of samples' images; the filler's do not count.
        num_patches: patches of samples' images.
        num_slots: B times S, padding and filler and all.
        squared_slots: B times S squared.
        squared_tokens: the sum over samples of their tokens squared.
        squared_patches: the sum over samples' images of their patches squared.
        num_samples_by_source: [number of sources] int64.
        num_label_tokens_by_source: [number of sources] int64.
    """

    input_ids_BS: torch.Tensor
    labels_BS: torch.Tensor
    position_ids_3BS: torch.Tensor
    segment_ids_BS: torch.Tensor | None
    source_ids_BS: torch.Tensor
    pixel_values_PD: torch.Tensor
    grid_thw_I3: torch.Tensor
    num_rows: int
    num_samples: int
    num_label_tokens: int
    num_text_tokens: int
    num_image_tokens: int
    num_patches: int
    num_slots: int
    num_samples_by_source: np.ndarray
    num_label_tokens_by_source: np.ndarray
    num_paired: int = 0
    squared_slots: int = 0
    squared_tokens: int = 0
    squared_patches: int = 0

    def to(self, device: torch.device) -> MicroBatch:
        """Move the tensors to a device."""
        return self.change(lambda _, tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> MicroBatch:
        """Copy the tensors to page-locked memory, from which a GPU reads without waiting."""
        return self.change(lambda _, tensor: tensor.pin_memory())

    def change(self, made: Callable[[str, torch.Tensor], torch.Tensor]) -> MicroBatch:
        """Return a copy with every tensor made anew, by its field's name and what it is now."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        tensors = {name: part for name, part in values.items() if isinstance(part, torch.Tensor)}
        return replace(self, **{name: made(name, part) for name, part in tensors.items()})


class Normaliser(Protocol):
    """Turns patches into numbers: `images.patches.Patcher`, `TilePatcher`, `images.features`."""

    def normalise(self, images: Sequence[np.ndarray]) -> torch.Tensor:
        """Return [P, D] float32 of images, [p, bytes of a patch] uint8 each."""
        ...

    def filler(self, num_rows: int) -> torch.Tensor:
        """Return [num_rows, D] float32 that stand for images of so many patches or tiles."""
        ...


def collate(
    rows: Sequence[Sequence[Ready]],
    *,
    patcher: Normaliser,
    info: ProcessorInfo,
    num_sources: int,
    row_tokens: int | None = None,
    multiples: Multiples = Multiples(),
) -> MicroBatch:
    """Put rows into one micro-batch.

    A row without sample becomes padding without label. A micro-batch without image, or with too few
    patches for its shape, gets one filler image, whose tokens stand at the end of a row, after its
    padding and without label: the vision tower runs on every rank in every micro-batch, and no real
    token sees the filler. Rows become longer where none has room for it.

    Args:
        rows: the samples of each row, in order.
        patcher: turns what `Ready.patches` holds into what the vision tower takes.
        info: the processor's token ids and image settings.
        num_sources: how many sources the data has.
        row_tokens: None where each row is at most one sample: rows are padded to the longest. A
            number where rows hold several: every row is padded to it.
        multiples: what lengths of rows and numbers of patches are multiples of.
    """
    samples = _samples(rows)
    grids = _grids(samples)
    fillers = _fillers(_num_rows(samples), info=info, multiples=multiples)
    num_filler_tokens = sum(filler.num_tokens for filler in fillers)
    canvas = _draw(
        rows,
        row_tokens=row_tokens,
        num_filler_tokens=num_filler_tokens,
        info=info,
        multiples=multiples,
    )
    # Tokens take features row by row, so the fillers' images stand where their row does.
    before = _samples(rows[: canvas.filler_row + 1])
    at = sum(len(sample.encoded.pictures) for sample in before)
    grids[at:at] = [filler.grid for filler in fillers]
    pixels_PD = _pixels(
        samples,
        patcher=patcher,
        filler=sum(filler.num_rows for filler in fillers),
        after=_num_rows(before),
    )
    segment_ids_BS = torch.from_numpy(canvas.segment_ids_BS) if row_tokens is not None else None
    return MicroBatch(
        input_ids_BS=torch.from_numpy(canvas.input_ids_BS),
        labels_BS=torch.from_numpy(canvas.labels_BS),
        position_ids_3BS=torch.from_numpy(canvas.position_ids_3BS),
        segment_ids_BS=segment_ids_BS,
        source_ids_BS=torch.from_numpy(canvas.source_ids_BS),
        pixel_values_PD=pixels_PD,
        grid_thw_I3=torch.tensor([[1, *grid] for grid in grids], dtype=torch.int64),
        num_rows=sum(map(bool, rows)),
        num_patches=sum(sample.encoded.num_patches for sample in samples),
        num_slots=canvas.input_ids_BS.size,
        squared_slots=canvas.input_ids_BS.size * canvas.input_ids_BS.shape[1],
        **_count(samples, num_sources=num_sources),
    )


def _grids(samples: Sequence[Ready]) -> list[tuple[int, int]]:
    """Return the grid of every image, and check that it has the rows of pixels it should."""
    pictures = [picture for sample in samples for picture in sample.encoded.pictures]
    expected = [picture.num_rows for picture in pictures]
    found = [len(part) for sample in samples for part in sample.patches]
    assert found == expected, (
        f"the image processor made {found} patches or tiles, the arithmetic says {expected}"
    )
    return [picture.grid for picture in pictures]


def _fillers(num_rows: int, *, info: ProcessorInfo, multiples: Multiples) -> tuple[Picture, ...]:
    arithmetic = family(info.family)
    wanted = multiples.num_filler_rows(
        num_rows,
        unit=arithmetic.unit_rows(info.image),
        least=arithmetic.least_filler(info.image),
    )
    return arithmetic.filler(wanted, image=info.image) if wanted else ()


def _samples(rows: Sequence[Sequence[Ready]]) -> list[Ready]:
    return [sample for row in rows for sample in row]


def _num_rows(samples: Sequence[Ready]) -> int:
    return sum(len(part) for sample in samples for part in sample.patches)


def _pixels(
    samples: Sequence[Ready], *, patcher: Normaliser, filler: int, after: int
) -> torch.Tensor:
    """Normalise the images, and put a filler of so many patches after so many of them."""
    patches = [part for sample in samples for part in sample.patches]
    if not patches:
        return patcher.filler(filler)
    pixels_PD = patcher.normalise(patches)
    if not filler:
        return pixels_PD
    return torch.cat([pixels_PD[:after], patcher.filler(filler), pixels_PD[after:]])


def _draw(
    rows: Sequence[Sequence[Ready]],
    *,
    row_tokens: int | None,
    num_filler_tokens: int,
    info: ProcessorInfo,
    multiples: Multiples,
) -> _Canvas:
    """Write the rows, and the filler's tokens at the end of the row with the most room."""
    lengths = [sum(len(sample.encoded.input_ids) for sample in row) for row in rows]
    width = multiples.row_tokens(row_tokens or max(1, *lengths))
    slot = min(range(len(rows)), key=lengths.__getitem__)
    if lengths[slot] + num_filler_tokens > width:
        width = _wider(
            lengths[slot] + num_filler_tokens,
            width=width if row_tokens is not None else None,
            multiples=multiples,
            info=info,
        )
    canvas = _Canvas(len(rows), width=width, filler_row=slot, info=info)
    for number, row in enumerate(rows):
        canvas.draw(number, row=row, is_packed=row_tokens is not None)
    if num_filler_tokens:
        canvas.input_ids_BS[slot, -num_filler_tokens:] = info.tokens.image
    return canvas


def _wider(needed: int, *, width: int | None, multiples: Multiples, info: ProcessorInfo) -> int:
    """Return a length of rows that has room for a filler behind the shortest row.

    Rows that hold several samples all have one length, and so they get one other: with room for
    the largest filler there can be.
    """
    if width is None:
        return multiples.row_tokens(needed)
    arithmetic = family(info.family)
    most = multiples.most_filler_rows(
        unit=arithmetic.unit_rows(info.image), least=arithmetic.least_filler(info.image)
    )
    fillers = arithmetic.filler(most, image=info.image)
    return width + multiples.row_tokens(sum(filler.num_tokens for filler in fillers))


def _count(samples: Sequence[Ready], *, num_sources: int) -> dict[str, Any]:
    encoded = [sample.encoded for sample in samples]
    sources = np.array([sample.source for sample in samples], dtype=np.int64)
    labels = np.array([one.num_label_tokens for one in encoded], dtype=np.int64)
    num_image_tokens = sum(one.num_image_tokens for one in encoded)
    by_source = np.bincount(sources, weights=labels, minlength=num_sources)
    return {
        "num_samples": len(samples),
        "squared_tokens": sum(len(one.input_ids) ** 2 for one in encoded),
        "squared_patches": sum(
            picture.num_patches**2 for one in encoded for picture in one.pictures
        ),
        "num_paired": sum(1 for one in encoded if one.num_image_tokens and one.num_label_tokens),
        "num_label_tokens": int(labels.sum()),
        "num_text_tokens": sum(len(one.input_ids) for one in encoded) - num_image_tokens,
        "num_image_tokens": num_image_tokens,
        "num_samples_by_source": np.bincount(sources, minlength=num_sources).astype(np.int64),
        "num_label_tokens_by_source": by_source.astype(np.int64),
    }


class _Canvas:
    """The arrays of a micro-batch, padding at first."""

    def __init__(self, num_rows: int, *, width: int, filler_row: int, info: ProcessorInfo) -> None:
        shape = (num_rows, width)
        self.filler_row = filler_row
        self.input_ids_BS = np.full(shape, info.tokens.pad, dtype=np.int64)
        self.labels_BS = np.full(shape, IGNORED_LABEL, dtype=np.int64)
        self.position_ids_3BS = np.zeros((3, *shape), dtype=np.int64)
        self.segment_ids_BS = np.zeros(shape, dtype=np.int32)
        self.source_ids_BS = np.full(shape, _NO_SOURCE, dtype=np.int16)
        self._info = info
        self._arithmetic = family(info.family)

    def draw(self, number: int, *, row: Sequence[Ready], is_packed: bool) -> None:
        """Write a row's samples one after the other."""
        start = 0
        for segment, sample in enumerate(row, start=1):
            encoded = sample.encoded
            place = slice(start, start + len(encoded.input_ids))
            self.input_ids_BS[number, place] = encoded.input_ids
            self.labels_BS[number, place] = encoded.labels
            if is_packed:
                # The token before it belongs to another sample and must not predict it.
                self.labels_BS[number, start] = IGNORED_LABEL
            self.position_ids_3BS[:, number, place] = self._arithmetic.position_ids(
                encoded.input_ids,
                grids=encoded.grids,
                image=self._info.image,
                image_token_id=self._info.tokens.image,
            )
            self.segment_ids_BS[number, place] = segment
            self.source_ids_BS[number, place] = sample.source
            start = place.stop
