"""The model families that are built, found by name.

A family's arithmetic goes in as sizes and image settings and comes out as plain numbers. Weights,
torch and files are unknown here; the torch side of a family is `model/<family>.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from diptych.core.errors import ConfigError, nearest
from diptych.core.records import Dtype, ImageSettings, MemoryOptions, Parameter, TokenIds
from diptych.shape.flops import BatchCounts, Flops
from diptych.shape.qwen3_vl import Qwen3VL, Sizes, Tower

PLANNED = ("qwen2_5_vl", "internvl", "llava", "llava_onevision", "smolvlm", "gemma3")
"""Families that the design names and nobody has built yet."""


class Family(Protocol):
    """The arithmetic of one model family. `sizes` has the groups `text` and `vision`."""

    name: str
    block_lists: tuple[str, ...]
    """Full names of the module lists whose items are the sharding units."""
    connectors: tuple[str, ...]
    """Full names of the connector's modules, or of lists of them."""
    tied_parameters: dict[str, str]
    """With tied word embeddings: the parameter that is absent -> the one that stands for it."""

    def resolve(self, sizes: Sizes) -> dict[str, dict[str, Any]]:
        """Check the sizes and fill in every one that is absent.

        Raises:
            ConfigError: a name is unknown (the nearest is named) or a size cannot work.
        """
        ...

    def check(self, sizes: Sizes, *, image: ImageSettings, tokens: TokenIds) -> None:
        """Refuse sizes that contradict the processor.

        Raises:
            ConfigError: patch, merge or temporal size differ, or the vocabulary is too small.
        """
        ...

    def grid(self, *, width_px: int, height_px: int, image: ImageSettings) -> tuple[int, int]:
        """Return (rows, columns) of patches that the processor cuts an image into.

        Raises:
            DataError: one side is more than 200 times the other.
        """
        ...

    def num_patches(self, *, width_px: int, height_px: int, image: ImageSettings) -> int:
        """Count the patches that the vision tower sees of an image."""
        ...

    def num_image_tokens(self, *, width_px: int, height_px: int, image: ImageSettings) -> int:
        """Count the tokens that the decoder sees of an image."""
        ...

    def position_ids(
        self,
        input_ids: np.ndarray,
        *,
        grids: Sequence[tuple[int, int]],
        image: ImageSettings,
        image_token_id: int,
    ) -> np.ndarray:
        """Return the rotary positions of one row.

        Args:
            input_ids: [S] int64, image placeholders expanded.
            grids: (rows, columns) of patches of each image, in the order in which they stand.
            image: the processor's image settings.
            image_token_id: the placeholder's id.

        Returns:
            [3, S] int64: temporal, row and column positions.
        """
        ...

    def tower(self, name: str) -> Tower:
        """Say which tower a parameter is in, by its full name."""
        ...

    def block(self, name: str) -> str:
        """Name the sharding unit that a parameter is in, '' for the root."""
        ...

    def parameters(self, sizes: Sizes, *, tied: bool) -> tuple[Parameter, ...]:
        """List every distinct parameter in the model's order."""
        ...

    def forward_flops(self, sizes: Sizes, *, counts: BatchCounts) -> Flops:
        """Count the matrix multiplications of one forward pass."""
        ...

    def train_flops(self, sizes: Sizes, *, counts: BatchCounts) -> float:
        """Count the matrix multiplications of forward and backward with every weight trained."""
        ...

    def activation_bytes(
        self,
        sizes: Sizes,
        *,
        counts: BatchCounts,
        precision: Dtype,
        memory: MemoryOptions = MemoryOptions(),  # noqa: B008 - frozen
    ) -> float:
        """Estimate the bytes that a micro-batch holds at the peak of its backward pass.

        On the device, where activations are offloaded: what autograd saves, or what recomputing
        leaves of it, and the gradients in flight of one layer.
        """
        ...


_FAMILIES: dict[str, Family] = {"qwen3_vl": Qwen3VL()}


def family(name: str) -> Family:
    """Return the family of that name.

    Raises:
        ConfigError: there is none, or it is not built yet.
    """
    if name in _FAMILIES:
        return _FAMILIES[name]
    built = ", ".join(sorted(_FAMILIES))
    if name in PLANNED:
        raise ConfigError(
            f"The model family '{name}' is not built yet",
            allowed=f"Built: {built}",
            cure="Set plan.model.family to a family that is built",
        )
    raise ConfigError(
        f"There is no model family '{name}'",
        allowed=f"Built: {built}",
        cure=nearest(name, allowed=(*_FAMILIES, *PLANNED)),
    )
