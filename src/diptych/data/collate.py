"""Rows as the tensors of one micro-batch.

Encoded rows and decoded images flow in, with the processor's own image processor; right-padded
tensors and their counts flow out. Which rows belong together is unknown here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from diptych.core.axes import IGNORED_LABEL
from diptych.core.records import ImageSettings, ProcessorInfo
from diptych.data.encode import Encoded
from diptych.shape.families import family

if TYPE_CHECKING:
    from transformers import BaseImageProcessor

_NUM_CHANNELS = 3


@dataclass
class MicroBatch:
    """One micro-batch. Causal attention and right padding make an attention mask superfluous.

    Attributes:
        input_ids_BS: [B, S] int64.
        labels_BS: [B, S] int64, aligned with the ids (not shifted), -100 where nothing is learnt.
        position_ids_3BS: [3, B, S] int64; 0 at padding.
        pixel_values_PD: [P, D] float32, never empty: without images there is one dummy.
        grid_thw_I3: [I, 3] int64.
        num_rows: rows that hold a sample.
        num_label_tokens: labels that a shifted loss uses.
        num_text_tokens: tokens of samples that are not images'.
        num_image_tokens: tokens of samples' images; the dummy's do not count.
        num_patches: patches of samples' images.
        num_slots: B times S, padding and all.
    """

    input_ids_BS: torch.Tensor
    labels_BS: torch.Tensor
    position_ids_3BS: torch.Tensor
    pixel_values_PD: torch.Tensor
    grid_thw_I3: torch.Tensor
    num_rows: int
    num_label_tokens: int
    num_text_tokens: int
    num_image_tokens: int
    num_patches: int
    num_slots: int

    def to(self, device: torch.device) -> MicroBatch:
        """Move the tensors to a device."""
        moved = {
            field.name: value.to(device, non_blocking=True)
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), torch.Tensor)
        }
        return replace(self, **moved)


def collate(
    rows: Sequence[Encoded | None],
    *,
    images: Sequence[np.ndarray],
    image_processor: BaseImageProcessor,
    info: ProcessorInfo,
) -> MicroBatch:
    """Put rows into one micro-batch.

    A row of None becomes one padding token without label. Without any image, one dummy image of
    one token stands at the end of row 0, after its padding and without label, so that the vision
    tower runs on every rank in every micro-batch and no real token sees it.

    Args:
        rows: one a row of the micro-batch.
        images: [H, W, 3] uint8 each, those of all rows in order.
        image_processor: the processor's own, see `load_image_processor`.
        info: the processor's token ids and image settings.
    """
    present = [row for row in rows if row is not None]
    has_dummy = not images
    input_ids_BS, labels_BS, positions_3BS = _pad(rows, has_dummy=has_dummy, info=info)
    if has_dummy:
        pixel_values_PD, grid_thw_I3 = _dummy_image(info.image)
    else:
        pixel_values_PD, grid_thw_I3 = process_images(images, image_processor=image_processor)
        expected = [[1, *grid] for row in present for grid in row.grids]
        assert grid_thw_I3.tolist() == expected, (
            f"the image processor made grids {grid_thw_I3.tolist()}, the arithmetic says {expected}"
        )
    num_image_tokens = sum(row.num_image_tokens for row in present)
    return MicroBatch(
        input_ids_BS=torch.from_numpy(input_ids_BS),
        labels_BS=torch.from_numpy(labels_BS),
        position_ids_3BS=torch.from_numpy(positions_3BS),
        pixel_values_PD=pixel_values_PD,
        grid_thw_I3=grid_thw_I3,
        num_rows=len(present),
        num_label_tokens=sum(row.num_label_tokens for row in present),
        num_text_tokens=sum(len(row.input_ids) for row in present) - num_image_tokens,
        num_image_tokens=num_image_tokens,
        num_patches=sum(row.num_patches for row in present),
        num_slots=input_ids_BS.size,
    )


def load_image_processor(processor: Path) -> BaseImageProcessor:
    """Load the image processor of a processor's folder, as AutoProcessor would."""
    from transformers import AutoImageProcessor

    loaded: Any = AutoImageProcessor.from_pretrained(processor, local_files_only=True)
    return loaded


def process_images(
    images: Sequence[np.ndarray], *, image_processor: BaseImageProcessor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Resize, normalise and cut images into patches.

    Args:
        images: [H, W, 3] uint8 each.
        image_processor: the processor's own.

    Returns:
        [P, D] float32 patches and [I, 3] int64 grids.
    """
    # The format is said, for an image of 1, 3 or 4 columns could be taken for channels last.
    made = image_processor(
        [torch.from_numpy(np.array(image.transpose(2, 0, 1))) for image in images],
        input_data_format="channels_first",
        disable_grouping=False,
        return_tensors="pt",
    )
    return made["pixel_values"], made["image_grid_thw"]


def _pad(
    rows: Sequence[Encoded | None], *, has_dummy: bool, info: ProcessorInfo
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return ids, labels and positions, [B, S] or [3, B, S], with room for the dummy's token."""
    lengths = [1 if row is None else len(row.input_ids) for row in rows]
    width = max(max(lengths), lengths[0] + 1) if has_dummy else max(lengths)
    input_ids_BS = np.full((len(rows), width), info.tokens.pad, dtype=np.int64)
    labels_BS = np.full((len(rows), width), IGNORED_LABEL, dtype=np.int64)
    positions_3BS = np.zeros((3, len(rows), width), dtype=np.int64)
    arithmetic = family(info.family)
    for number, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        if row is None:
            continue
        input_ids_BS[number, :length] = row.input_ids
        labels_BS[number, :length] = row.labels
        positions_3BS[:, number, :length] = arithmetic.position_ids(
            row.input_ids,
            grids=row.grids,
            image=info.image,
            image_token_id=info.tokens.image,
        )
    if has_dummy:
        input_ids_BS[0, -1] = info.tokens.image
    return input_ids_BS, labels_BS, positions_3BS


def _dummy_image(image: ImageSettings) -> tuple[torch.Tensor, torch.Tensor]:
    """Make a grey image of one token: [merge * merge, D] zeros and its grid."""
    width = _NUM_CHANNELS * image.temporal_patch * image.patch_px**2
    return (
        torch.zeros((image.merge**2, width), dtype=torch.float32),
        torch.tensor([[1, image.merge, image.merge]], dtype=torch.int64),
    )
