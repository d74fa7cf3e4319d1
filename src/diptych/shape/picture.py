"""What one image becomes: how many rows of pixels, patches and tokens, and its text.

Plain numbers; which family's rule made them is unknown here.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Picture:
    """One image, as a family's processor sees it.

    Attributes:
        grid: (rows, columns) of patches of an image that is one grid; (height, width) in px of one
            that is cut into tiles.
        num_rows: rows of the array of its pixels: patches, or tiles.
        num_patches: patches that the vision tower sees.
        runs: how many tokens stand together, for each time that they do.
        frame: the text that stands for it, with one token for each run; None: one token alone.
    """

    grid: tuple[int, int]
    num_rows: int
    num_patches: int
    runs: tuple[int, ...]
    frame: str | None = None

    @property
    def num_tokens(self) -> int:
        """Count the tokens that the decoder sees features in."""
        return sum(self.runs)
