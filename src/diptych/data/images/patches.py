"""Images as a model's patches or tiles, in two steps: cut into bytes, then normalised to numbers.

In: decoded images and the processor's own image processor. Out: first each image's patches (or
tiles) as bytes, the form that can be kept; then float32, bitwise what the image processor makes of
the image at once. Batches and files are unknown here.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from diptych.core.axes import NUM_CHANNELS
from diptych.core.records import AnyImageSettings, TileSettings

if TYPE_CHECKING:
    from transformers import BaseImageProcessor


class Patcher:
    """The two steps for a family of native grids, with the settings of one image processor."""

    def __init__(self, image_processor: BaseImageProcessor) -> None:
        self._settings: Any = image_processor

    cuts_by_number = False
    """Whether an image of several in a conversation is cut otherwise than one that is alone."""

    def cut(self, image: np.ndarray, *, num_images: int = 1) -> np.ndarray:
        """Resize an image and cut it into patches.

        Args:
            image: [H, W, 3] uint8.
            num_images: of the conversation, which changes nothing.

        Returns:
            [P, 3 * patch_px**2] uint8: the merged patches' parts stand together, channels first.

        Source: `Qwen2VLImageProcessor.resize` and `.patchify`.
        Differs: bytes instead of float32, of which repeated frames are left out; and each line of
            a patch is moved as one element, which takes a sixth of the time.
        """
        settings = self._settings
        # A channels-last view: the resizing works on whole pixels, so nothing is copied.
        pixels = torch.from_numpy(_writable(image)).permute(2, 0, 1)[None]
        if settings.do_resize:
            pixels = settings.resize(
                pixels,
                size=settings.size,
                resample=settings.resample,
                factor=settings.patch_size * settings.merge_size,
            )
        side, merge = settings.patch_size, settings.merge_size
        pixels_CHW = np.ascontiguousarray(pixels[0].numpy())
        _, height, width = pixels_CHW.shape
        lines = pixels_CHW.view(np.dtype((np.void, side))).reshape(
            NUM_CHANNELS, height // (merge * side), merge, side, width // (merge * side), merge
        )
        patches = np.ascontiguousarray(lines.transpose(1, 4, 2, 5, 0, 3))
        return patches.view(np.uint8).reshape(-1, NUM_CHANNELS * side**2)

    def normalise(self, images: Sequence[np.ndarray]) -> torch.Tensor:
        """Turn the patches of images into what the vision tower takes.

        Args:
            images: at least one; [p, 3 * patch_px**2] uint8 each, as `cut` made them.

        Returns:
            [P, D] float32, image after image.
        """
        settings = self._settings
        side, frames = settings.patch_size, settings.temporal_patch_size
        counts = [len(image) for image in images]
        made = torch.empty((sum(counts), NUM_CHANNELS, frames, side**2))
        for image, part in zip(images, torch.split(made, counts), strict=True):
            normalised = settings.rescale_and_normalize(
                torch.from_numpy(_writable(image)).view(-1, NUM_CHANNELS, side, side),
                settings.do_rescale,
                settings.rescale_factor,
                settings.do_normalize,
                settings.image_mean,
                settings.image_std,
            )
            part.copy_(normalised.view(-1, NUM_CHANNELS, 1, side**2).expand_as(part))
        return made.view(len(made), -1)

    def filler(self, num_rows: int) -> torch.Tensor:
        """Make the patches of a grey image, [num_rows, D] float32 zeros."""
        settings = self._settings
        width = NUM_CHANNELS * settings.temporal_patch_size * settings.patch_size**2
        return torch.zeros((num_rows, width))


class TilePatcher:
    """The two steps for a family of tiles, with the settings of one image processor."""

    def __init__(self, image_processor: BaseImageProcessor, *, image: TileSettings) -> None:
        self._processor: Any = image_processor
        self._side_px = image.side_px
        self.cuts_by_number = bool(image.resolutions)
        # InternVL's processor says so, whatever its image processor's own setting is.
        self._told = (
            {"crop_to_patches": True} if hasattr(image_processor, "crop_to_patches") else {}
        )

    def cut(self, image: np.ndarray, *, num_images: int = 1) -> np.ndarray:
        """Resize an image and cut it into tiles, as the image processor does it.

        Args:
            image: [H, W, 3] uint8.
            num_images: of the conversation.

        Returns:
            [T, 3 * side**2] uint8: every tile's channels, row after row.
        """
        # A channels-last view, as of an image that was opened: the resizing works on whole pixels.
        pixels = torch.from_numpy(_writable(image)).permute(2, 0, 1)
        images: Any = pixels
        if self.cuts_by_number and num_images > 1:
            # A second one, of four pixels, makes a conversation of several.
            images = [[pixels, torch.zeros((NUM_CHANNELS, 2, 2), dtype=pixels.dtype)]]
        made = self._processor(
            images, do_rescale=False, do_normalize=False, return_tensors="pt", **self._told
        )["pixel_values"]
        tiles = made.reshape(-1, NUM_CHANNELS * self._side_px**2)
        if images is not pixels:
            tiles = tiles[:1]
        return tiles.to(torch.uint8).numpy()

    def normalise(self, images: Sequence[np.ndarray]) -> torch.Tensor:
        """Turn the tiles of images into what the vision tower takes.

        Args:
            images: at least one; [t, 3 * side**2] uint8 each, as `cut` made them.

        Returns:
            [T, 3 * side**2] float32, image after image.
        """
        settings, side = self._processor, self._side_px
        tiles = torch.from_numpy(np.concatenate(images)).view(-1, NUM_CHANNELS, side, side)
        made = settings.rescale_and_normalize(
            tiles,
            settings.do_rescale,
            settings.rescale_factor,
            settings.do_normalize,
            settings.image_mean,
            settings.image_std,
        )
        return made.reshape(len(made), -1)

    def filler(self, num_rows: int) -> torch.Tensor:
        """Make grey tiles, [num_rows, 3 * side**2] float32; one family drops what is all zero."""
        return torch.full((num_rows, NUM_CHANNELS * self._side_px**2), 0.5)


def load_patcher(processor: Path, *, image: AnyImageSettings) -> Patcher | TilePatcher:
    """Load the image processor of a processor's folder, as AutoProcessor would."""
    from transformers import AutoImageProcessor

    found = AutoImageProcessor.from_pretrained(
        processor, local_files_only=True, trust_remote_code=False
    )
    if isinstance(image, TileSettings):
        return TilePatcher(found, image=image)
    return Patcher(found)


def _writable(image: np.ndarray) -> np.ndarray:
    """Copy what is read only, which torch warns of; nothing here writes to it."""
    return image if image.flags.writeable else image.copy()
