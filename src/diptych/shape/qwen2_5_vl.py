"""Qwen2.5-VL's arithmetic: most vision layers look at windows, and every MLP is gated.

Sizes are named as transformers' configs name them, complete ones flow in; what all native grids
share is in `shape/native.py`. Every number equals what transformers' processor and model say.
"""

from __future__ import annotations

from collections.abc import Iterator

from diptych.core.errors import ConfigError
from diptych.shape.anatomy import Anatomy
from diptych.shape.native import NativeGrid
from diptych.shape.tiles import decoder_widths, one_side
from diptych.shape.widths import Sizes, VisionWidths, Widths

_ANATOMY = Anatomy(
    vision="model.visual",
    vision_blocks="model.visual.blocks",
    connectors=("model.visual.merger",),
    decoder="model.language_model",
    decoder_blocks="model.language_model.layers",
)

TEXT, VISION = "qwen2_5_vl_text", "qwen2_5_vl_vision"
"""The towers' names in transformers; the family has no others."""

_COUNTS = {
    "text": ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    "vision": ("depth", "hidden_size", "num_heads", "spatial_merge_size", "window_size"),
}


class Qwen25VL(NativeGrid):
    """The family `qwen2_5_vl`; see `shape.families.Family` for what each method promises."""

    def __init__(self) -> None:
        super().__init__("qwen2_5_vl", anatomy=_ANATOMY)

    def unused(self, sizes: Sizes) -> tuple[str, ...]:
        """Name no parameter: the loss depends on all of them."""
        return ()

    def least_rows(self, sizes: Sizes) -> int:
        """Count the patches of one token."""
        return sizes["vision"]["spatial_merge_size"] ** 2

    def widths(self, sizes: Sizes) -> Widths:
        """Read the numbers that decide what the model computes and holds."""
        vision = sizes["vision"]
        merge, depth = vision["spatial_merge_size"], vision["depth"]
        return Widths(
            decoder=decoder_widths(sizes["text"]),
            vision=VisionWidths(
                num_layers=depth,
                width=vision["hidden_size"],
                inner=vision["intermediate_size"],
                is_gated=True,
                patch_numbers=vision["in_channels"]
                * one_side(vision["temporal_patch_size"])
                * one_side(vision["patch_size"]) ** 2,
                merged=merge**2,
                num_windowed=depth - len(set(vision["fullatt_block_indexes"])),
                window_side=_window_tokens(sizes) * merge,
            ),
        )


def mrope_section(head_dim: int) -> list[int]:
    """Share a head's frequencies among time, rows and columns as Qwen does: 16, 24 and 24 of 64."""
    half = head_dim // 2
    side = half * 24 // 64
    return [half - 2 * side, side, side]


def check_sizes(sizes: Sizes) -> None:
    """Refuse sizes, complete ones, that cannot work.

    Raises:
        ConfigError: says which, and what to do.
    """
    for fits, found, cure in _rules(sizes):
        if not fits:
            raise ConfigError(found, cure=cure)


def _rules(sizes: Sizes) -> Iterator[tuple[bool, str, str]]:
    """Yield whether a rule is kept, what breaks it and the cure; later rules rely on earlier."""
    for group, wanted in (("text", TEXT), ("vision", VISION)):
        found = sizes[group]["model_type"]
        yield (
            found == wanted,
            f"{group}.model_type is '{found}'",
            f"A model of 'qwen2_5_vl' has a '{wanted}': leave it out",
        )
        for name in _COUNTS[group]:
            count = sizes[group][name]
            yield count >= 1, f"{group}.{name} is {count}", "Set it to 1 or more"
    yield from _text_rules(sizes)
    yield from _vision_rules(sizes)


def _text_rules(sizes: Sizes) -> Iterator[tuple[bool, str, str]]:
    text = sizes["text"]
    width, heads = text["hidden_size"], text["num_attention_heads"]
    yield (
        width % (2 * heads) == 0,
        f"text.hidden_size {width} over num_attention_heads {heads} is no even number",
        "Rotary positions need an even head width: set other heads",
    )
    keys = text["num_key_value_heads"]
    yield (
        heads % keys == 0,
        f"text.num_attention_heads {heads} is no multiple of num_key_value_heads {keys}",
        "Choose key-value heads that divide the heads",
    )
    half, sections = width // heads // 2, text["rope_parameters"].get("mrope_section")
    yield (
        sections is not None and len(sections) == 3 and sum(sections) == half,
        f"text.rope_parameters.mrope_section is {sections}, a head is {2 * half} wide",
        f"The three must sum to {half}: leave it out for {mrope_section(2 * half)}",
    )
    yield (
        set(text["layer_types"]) == {"full_attention"},
        f"text.layer_types has {sorted(set(text['layer_types']) - {'full_attention'})}",
        "Sliding windows in the decoder are not built: set text.use_sliding_window: false",
    )


def _vision_rules(sizes: Sizes) -> Iterator[tuple[bool, str, str]]:
    text, vision = sizes["text"], sizes["vision"]
    width, heads, out = vision["hidden_size"], vision["num_heads"], vision["out_hidden_size"]
    yield (
        out == text["hidden_size"],
        f"vision.out_hidden_size is {out}, text.hidden_size is {text['hidden_size']}",
        "Leave vision.out_hidden_size out: it is then text.hidden_size",
    )
    yield (
        width % (4 * heads) == 0,
        f"vision.hidden_size {width} over num_heads {heads} is no multiple of 4",
        "Two-dimensional rotary positions need a head width that is a multiple of 4",
    )
    token_px = vision["spatial_merge_size"] * one_side(vision["patch_size"])
    yield (
        token_px > 0 and _window_tokens(sizes) >= 1,
        f"vision.window_size is {vision['window_size']} px, a token's side {token_px} px",
        f"A window holds a token or more: set it to a multiple of {token_px}, such as "
        f"{4 * token_px}",
    )
    whole, depth = list(vision["fullatt_block_indexes"]), vision["depth"]
    yield (
        all(0 <= index < depth for index in whole),
        f"vision.fullatt_block_indexes is {whole}",
        f"Name vision layers from 0 to {depth - 1}; the others look at windows",
    )


def _window_tokens(sizes: Sizes) -> int:
    """Count the tokens along a window's side, as `get_vision_window_index` does."""
    vision = sizes["vision"]
    return vision["window_size"] // vision["spatial_merge_size"] // one_side(vision["patch_size"])
