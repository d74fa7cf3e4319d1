"""Counts of a batch in, floating-point operations of its matrix multiplications out.

A multiplication of [m, k] by [k, n] counts 2mnk. Attention counts dense, causal or not, as
`torch.utils.flop_counter` counts scaled_dot_product_attention. What is not a matrix multiplication
(norms, softmax, activations, rotary positions) is not counted.
"""

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


@dataclass(frozen=True, kw_only=True)
class Flops:
    """Floating-point operations by part; `attention` is that of both towers."""

    language: float
    vision: float
    attention: float
    head: float

    @property
    def total(self) -> float:
        """Sum the parts."""
        return self.language + self.vision + self.attention + self.head
