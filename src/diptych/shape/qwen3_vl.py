"""Qwen3-VL's arithmetic: what its model computes and holds, beside what all native grids share.

Every number equals what transformers' processor and model say; tests hold them against each other.
"""

from __future__ import annotations

from diptych.core.records import AnyImageSettings, TokenIds
from diptych.shape import qwen3_vl_sizes
from diptych.shape.anatomy import Anatomy
from diptych.shape.native import NativeGrid
from diptych.shape.widths import DecoderWidths, Sizes, VisionWidths, Widths

_ANATOMY = Anatomy(
    vision="model.visual",
    vision_blocks="model.visual.blocks",
    connectors=("model.visual.merger", "model.visual.deepstack_merger_list"),
    decoder="model.language_model",
    decoder_blocks="model.language_model.layers",
)


class Qwen3VL(NativeGrid):
    """The family `qwen3_vl`; see `shape.families.Family` for what each method promises."""

    def __init__(self) -> None:
        super().__init__("qwen3_vl", anatomy=_ANATOMY)

    def check(self, sizes: Sizes, *, image: AnyImageSettings, tokens: TokenIds) -> None:
        """Refuse sizes that contradict the processor."""
        super().check(qwen3_vl_sizes.complete(sizes), image=image, tokens=tokens)

    def unused(self, sizes: Sizes) -> tuple[str, ...]:
        """Name no parameter: the loss depends on all of them."""
        return ()

    def least_rows(self, sizes: Sizes) -> int:
        """Count the patches of one token."""
        _, vision = qwen3_vl_sizes.resolve(sizes)
        return vision.spatial_merge_size**2

    def widths(self, sizes: Sizes) -> Widths:
        """Read the numbers that decide what the model computes and holds."""
        text, vision = qwen3_vl_sizes.resolve(sizes)
        num_levels = len(vision.deepstack_visual_indexes)
        return Widths(
            decoder=DecoderWidths(
                num_layers=text.num_hidden_layers,
                width=text.hidden_size,
                inner=text.intermediate_size,
                queries=text.num_attention_heads * text.head_dim,
                keys=text.num_key_value_heads * text.head_dim,
                vocab_size=text.vocab_size,
                num_added=num_levels,
            ),
            vision=VisionWidths(
                num_layers=vision.depth,
                width=vision.hidden_size,
                inner=vision.intermediate_size,
                patch_numbers=vision.in_channels
                * vision.temporal_patch_size
                * vision.patch_size**2,
                merged=vision.spatial_merge_size**2,
                num_connectors=1 + num_levels,
            ),
        )
