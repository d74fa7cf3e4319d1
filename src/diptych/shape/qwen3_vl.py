"""Qwen3-VL's arithmetic: what its processor makes of an image, what its model holds and computes.

Every number equals what transformers' processor and model say; tests hold them against each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, final

import numpy as np

from diptych.core.errors import DataError
from diptych.core.records import Dtype, ImageSettings, MemoryOptions, Parameter, TokenIds
from diptych.shape import qwen3_vl_activations, qwen3_vl_sizes
from diptych.shape.flops import BatchCounts, Flops
from diptych.shape.qwen3_vl_sizes import TextSizes, VisionSizes

MAX_ASPECT = 200
"""The longer side over the shorter above which transformers' processor refuses an image."""

Sizes = Mapping[str, Mapping[str, Any]]
Tower = Literal["vision", "connector", "language", "head"]


@final
class Qwen3VL:
    """The family `qwen3_vl`; see `shape.families.Family` for what each method promises."""

    name: str = "qwen3_vl"
    block_lists: tuple[str, ...] = ("model.visual.blocks", "model.language_model.layers")
    connectors: tuple[str, ...] = ("model.visual.merger", "model.visual.deepstack_merger_list")

    def __init__(self) -> None:
        self.tied_parameters = {"lm_head.weight": "model.language_model.embed_tokens.weight"}

    def resolve(self, sizes: Sizes) -> dict[str, dict[str, Any]]:
        """Check the sizes and fill in every one that is absent."""
        text, vision = qwen3_vl_sizes.resolve(sizes)
        return {"text": text.model_dump(mode="json"), "vision": vision.model_dump(mode="json")}

    def check(self, sizes: Sizes, *, image: ImageSettings, tokens: TokenIds) -> None:
        """Refuse sizes that contradict the processor."""
        text, vision = qwen3_vl_sizes.resolve(sizes)
        qwen3_vl_sizes.check_processor(vision, text=text, image=image, tokens=tokens)

    def grid(self, *, width_px: int, height_px: int, image: ImageSettings) -> tuple[int, int]:
        """Return (rows, columns) of patches that the processor cuts an image into.

        Source: `smart_resize` of transformers' qwen2_vl image processor.
        """
        if max(width_px, height_px) > MAX_ASPECT * min(width_px, height_px):
            raise DataError(
                f"An image of {width_px} x {height_px} px is too narrow",
                allowed=f"The longer side may be {MAX_ASPECT} times the shorter",
                cure="Crop it, or leave it out",
            )
        factor = image.patch_px * image.merge
        height = round(height_px / factor) * factor
        width = round(width_px / factor) * factor
        if height * width > image.max_area_px:
            beta = math.sqrt((height_px * width_px) / image.max_area_px)
            height = max(factor, math.floor(height_px / beta / factor) * factor)
            width = max(factor, math.floor(width_px / beta / factor) * factor)
        elif height * width < image.min_area_px:
            beta = math.sqrt(image.min_area_px / (height_px * width_px))
            height = math.ceil(height_px * beta / factor) * factor
            width = math.ceil(width_px * beta / factor) * factor
        return height // image.patch_px, width // image.patch_px

    def num_patches(self, *, width_px: int, height_px: int, image: ImageSettings) -> int:
        """Count the patches that the vision tower sees of an image."""
        rows, columns = self.grid(width_px=width_px, height_px=height_px, image=image)
        return rows * columns

    def num_image_tokens(self, *, width_px: int, height_px: int, image: ImageSettings) -> int:
        """Count the tokens that the decoder sees of an image."""
        patches = self.num_patches(width_px=width_px, height_px=height_px, image=image)
        return patches // image.merge**2

    def position_ids(
        self,
        input_ids: np.ndarray,
        *,
        grids: Sequence[tuple[int, int]],
        image: ImageSettings,
        image_token_id: int,
    ) -> np.ndarray:
        """Return the rotary positions of one row, [3, S] int64.

        A text token advances the position by one; an image stands at one temporal position and
        advances by its longer side, in tokens.

        Source: `Qwen3VLModel.get_rope_index`.
        """
        advance = np.ones(len(input_ids), dtype=np.int64)
        places: list[tuple[int, int, np.ndarray]] = []
        if grids:
            is_image = np.asarray(input_ids) == image_token_id
            advance[is_image] = 0
            slots = np.flatnonzero(is_image)
            end = 0
            for rows, columns in grids:
                offsets, longer = _image_offsets(rows // image.merge, columns // image.merge)
                start, end = end, end + offsets.shape[1]
                assert end <= len(slots), (
                    f"{len(slots)} image tokens are fewer than the grids ask for"
                )
                first, last = int(slots[start]), int(slots[end - 1])
                assert last - first == end - start - 1, "an image's tokens must stand together"
                advance[last] = longer
                places.append((first, last + 1, offsets))
            assert end == len(slots), f"{len(slots)} image tokens, the grids ask for {end}"
        positions = np.empty((3, len(advance)), dtype=np.int64)
        positions[:] = np.cumsum(advance) - advance
        for first, stop, offsets in places:
            positions[1:, first:stop] += offsets
        return positions

    def tower(self, name: str) -> Tower:
        """Say which tower a parameter is in, by its full name."""
        if name.startswith(("model.visual.merger.", "model.visual.deepstack_merger_list.")):
            return "connector"
        if name.startswith("model.visual."):
            return "vision"
        if name.startswith("model.language_model."):
            return "language"
        assert name.startswith("lm_head."), f"a parameter '{name}' of no tower"
        return "head"

    def block(self, name: str) -> str:
        """Name the sharding unit that a parameter is in, '' for the root."""
        for prefix in self.block_lists:
            if name.startswith(prefix + "."):
                return f"{prefix}.{name[len(prefix) + 1 :].split('.', 1)[0]}"
        return ""

    def parameters(self, sizes: Sizes, *, tied: bool) -> tuple[Parameter, ...]:
        """List every distinct parameter in the model's order."""
        text, vision = qwen3_vl_sizes.resolve(sizes)
        listed = [*_vision_parameters(vision), *_text_parameters(text)]
        if not tied:
            listed.append(("lm_head.weight", (text.vocab_size, text.hidden_size)))
        return tuple(
            Parameter(
                name=name,
                shape=shape,
                dtype="float32",
                tower=self.tower(name),
                block=self.block(name),
            )
            for name, shape in listed
        )

    def forward_flops(self, sizes: Sizes, *, counts: BatchCounts) -> Flops:
        """Count the matrix multiplications of one forward pass."""
        text, vision = qwen3_vl_sizes.resolve(sizes)
        heads_width = text.num_attention_heads * text.head_dim
        attention = (
            4 * text.num_hidden_layers * counts.squared_tokens * heads_width
            + 4 * vision.depth * counts.squared_patches * vision.hidden_size
        )
        layer = (
            text.hidden_size * (2 * heads_width + 2 * text.num_key_value_heads * text.head_dim)
            + 3 * text.hidden_size * text.intermediate_size
        )
        return Flops(
            language=2 * counts.num_tokens * text.num_hidden_layers * layer,
            vision=_vision_flops(vision, num_patches=counts.num_patches),
            attention=attention,
            head=2 * counts.num_head_tokens * text.hidden_size * text.vocab_size,
        )

    def train_flops(self, sizes: Sizes, *, counts: BatchCounts) -> float:
        """Count forward and backward, every weight trained: three times forward.

        The patch embedding counts twice only, as nothing asks for the pixels' gradient.
        """
        _, vision = qwen3_vl_sizes.resolve(sizes)
        pixels = 2 * counts.num_patches * _patch_width(vision) * vision.hidden_size
        return 3 * self.forward_flops(sizes, counts=counts).total - pixels

    def activation_bytes(
        self,
        sizes: Sizes,
        *,
        counts: BatchCounts,
        precision: Dtype,
        memory: MemoryOptions = MemoryOptions(),  # noqa: B008 - frozen
    ) -> float:
        """Estimate the bytes that a micro-batch holds at the peak of its backward pass."""
        text, vision = qwen3_vl_sizes.resolve(sizes)
        return qwen3_vl_activations.peak_bytes(
            text, vision, counts=counts, precision=precision, memory=memory
        )


@lru_cache(maxsize=4096)
def _image_offsets(rows: int, columns: int) -> tuple[np.ndarray, int]:
    """Return [2, rows * columns] int64 row and column of each token, and the longer side."""
    offsets = np.stack(
        [np.repeat(np.arange(rows), columns), np.tile(np.arange(columns), rows)]
    ).astype(np.int64)
    offsets.setflags(write=False)
    return offsets, max(rows, columns)


def _patch_width(vision: VisionSizes) -> int:
    return vision.in_channels * vision.temporal_patch_size * vision.patch_size**2


def _vision_flops(vision: VisionSizes, *, num_patches: int) -> float:
    """Count the vision tower and its mergers without attention."""
    width = vision.hidden_size
    per_patch = _patch_width(vision) * width
    per_patch += vision.depth * (4 * width * width + 2 * width * vision.intermediate_size)
    merged = width * vision.spatial_merge_size**2
    per_token = merged * merged + merged * vision.out_hidden_size
    num_mergers = 1 + len(vision.deepstack_visual_indexes)
    num_tokens = num_patches // vision.spatial_merge_size**2
    return 2.0 * (num_patches * per_patch + num_tokens * num_mergers * per_token)


_Line = tuple[str, tuple[int, ...]]


def _affine(name: str, *, out: int, into: int, bias: bool = True) -> Iterator[_Line]:
    yield f"{name}.weight", (out, into)
    if bias:
        yield f"{name}.bias", (out,)


def _layer_norm(name: str, *, width: int) -> Iterator[_Line]:
    yield f"{name}.weight", (width,)
    yield f"{name}.bias", (width,)


def _merger(name: str, *, vision: VisionSizes, norm_width: int) -> Iterator[_Line]:
    merged = vision.hidden_size * vision.spatial_merge_size**2
    yield from _layer_norm(f"{name}.norm", width=norm_width)
    yield from _affine(f"{name}.linear_fc1", out=merged, into=merged)
    yield from _affine(f"{name}.linear_fc2", out=vision.out_hidden_size, into=merged)


def _vision_parameters(vision: VisionSizes) -> Iterator[_Line]:
    root, width = "model.visual", vision.hidden_size
    kernel = (vision.temporal_patch_size, vision.patch_size, vision.patch_size)
    yield f"{root}.patch_embed.proj.weight", (width, vision.in_channels, *kernel)
    yield f"{root}.patch_embed.proj.bias", (width,)
    yield f"{root}.pos_embed.weight", (vision.num_position_embeddings, width)
    for index in range(vision.depth):
        layer = f"{root}.blocks.{index}"
        yield from _layer_norm(f"{layer}.norm1", width=width)
        yield from _layer_norm(f"{layer}.norm2", width=width)
        yield from _affine(f"{layer}.attn.qkv", out=3 * width, into=width)
        yield from _affine(f"{layer}.attn.proj", out=width, into=width)
        yield from _affine(f"{layer}.mlp.linear_fc1", out=vision.intermediate_size, into=width)
        yield from _affine(f"{layer}.mlp.linear_fc2", out=width, into=vision.intermediate_size)
    yield from _merger(f"{root}.merger", vision=vision, norm_width=width)
    merged = width * vision.spatial_merge_size**2
    for index in range(len(vision.deepstack_visual_indexes)):
        name = f"{root}.deepstack_merger_list.{index}"
        yield from _merger(name, vision=vision, norm_width=merged)


def _text_parameters(text: TextSizes) -> Iterator[_Line]:
    root, width = "model.language_model", text.hidden_size
    queries = text.num_attention_heads * text.head_dim
    keys = text.num_key_value_heads * text.head_dim
    bias = text.attention_bias
    yield f"{root}.embed_tokens.weight", (text.vocab_size, width)
    for index in range(text.num_hidden_layers):
        layer = f"{root}.layers.{index}"
        yield from _affine(f"{layer}.self_attn.q_proj", out=queries, into=width, bias=bias)
        yield from _affine(f"{layer}.self_attn.k_proj", out=keys, into=width, bias=bias)
        yield from _affine(f"{layer}.self_attn.v_proj", out=keys, into=width, bias=bias)
        yield from _affine(f"{layer}.self_attn.o_proj", out=width, into=queries, bias=bias)
        yield f"{layer}.self_attn.q_norm.weight", (text.head_dim,)
        yield f"{layer}.self_attn.k_norm.weight", (text.head_dim,)
        for name in ("gate_proj", "up_proj"):
            yield f"{layer}.mlp.{name}.weight", (text.intermediate_size, width)
        yield f"{layer}.mlp.down_proj.weight", (width, text.intermediate_size)
        yield f"{layer}.input_layernorm.weight", (width,)
        yield f"{layer}.post_attention_layernorm.weight", (width,)
    yield f"{root}.norm.weight", (width,)
