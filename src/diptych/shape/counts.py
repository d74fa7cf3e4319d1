"""What of a batch decides its cost: sums over its rows and over its images, as plain numbers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class BatchCounts:
    """What of a batch decides its cost; sums over rows and over images."""

    num_tokens: int
    """Tokens that the decoder computes, padding included."""
    squared_tokens: int
    """Sum over rows of the row's length squared, padding included."""
    num_patches: int
    squared_patches: int
    """Sum over images of the image's patches squared."""
    num_head_tokens: int
    """Tokens for which logits are computed."""
    squared_windows: float | None = None
    """Sum over windows of the window's patches squared, in a tower that has windows."""

    @classmethod
    def of(
        cls, row_lengths: Iterable[int], *, image_patches: Iterable[int], num_head_tokens: int
    ) -> BatchCounts:
        """Sum up rows of given lengths and images of given patch counts."""
        rows, images = list(row_lengths), list(image_patches)
        return cls(
            num_tokens=sum(rows),
            squared_tokens=sum(length * length for length in rows),
            num_patches=sum(images),
            squared_patches=sum(patches * patches for patches in images),
            num_head_tokens=num_head_tokens,
        )
