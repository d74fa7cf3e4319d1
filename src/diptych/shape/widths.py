"""The numbers of a model that decide what it computes and holds: widths and depths, by tower.

A family reads them out of its sizes; FLOPs and activations are counted from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Sizes = Mapping[str, Mapping[str, Any]]
"""A model's sizes in groups, as transformers names them: `text`, `vision`, and its own."""


@dataclass(frozen=True, kw_only=True)
class DecoderWidths:
    """A decoder whose MLP is gated.

    Attributes:
        num_layers: how many.
        width: of the hidden states.
        inner: of the MLP.
        queries: heads times their width.
        keys: key-value heads times their width.
        vocab_size: words of the head.
        num_added: how often features of images are added between layers.
    """

    num_layers: int
    width: int
    inner: int
    queries: int
    keys: int
    vocab_size: int
    num_added: int = 0


@dataclass(frozen=True, kw_only=True)
class VisionWidths:
    """A vision tower and its connector.

    Attributes:
        num_layers: how many.
        width: of the hidden states.
        inner: of the MLP.
        is_gated: whether the MLP has three matrices.
        patch_numbers: numbers in the pixels of one patch.
        merged: patches that the connector makes one token of.
        num_connectors: how many modules do so.
        tile_patches: patches of a tile, which see each other alone; None: an image is one tile.
        extra: tokens of a tile beside its patches.
        num_windowed: layers in which patches see those of their window only.
        window_side: patches along a window's side, where there are such layers.
    """

    num_layers: int
    width: int
    inner: int
    is_gated: bool = False
    patch_numbers: int
    merged: int
    num_connectors: int = 1
    tile_patches: int | None = None
    extra: int = 0
    num_windowed: int = 0
    window_side: int | None = None


@dataclass(frozen=True, kw_only=True)
class Widths:
    """Both towers."""

    decoder: DecoderWidths
    vision: VisionWidths
