"""Counts of a batch in, floating-point operations of its matrix multiplications out.

A multiplication of [m, k] by [k, n] counts 2mnk. Attention counts dense, causal or not, as
`torch.utils.flop_counter` counts scaled_dot_product_attention. What is not a matrix multiplication
(norms, softmax, activations, rotary positions) is not counted. Every family is counted alike: by
its matrices, each times the rows that it is multiplied by.
"""

from __future__ import annotations

import fnmatch
import math
from dataclasses import dataclass, replace

from diptych.core.records import MemoryOptions, ModelShape, Parameter
from diptych.shape.adapters import input_name
from diptych.shape.counts import BatchCounts
from diptych.shape.families import family
from diptych.shape.widths import VisionWidths, Widths

_LOOKED_UP = (
    "position_embedding.weight",
    "position_embeddings",
    "pos_embed.weight",
    "_token",
    "probe",
)
"""Endings of names of arrays that are read or added, not multiplied by."""

_ORDER = ("vision", "connector", "language", "head")
"""Towers as a forward pass reaches them."""

_POOLER = ".head."
"""What makes one vector of a tile in vision towers that have it; nothing here reads it."""


@dataclass(frozen=True, kw_only=True)
class Flops:
    """Floating-point operations by part; `attention` is that of both towers.

    The connector is counted with the vision tower, of which it is a small part.
    """

    language: float
    vision: float
    attention: float
    head: float

    @property
    def total(self) -> float:
        """Sum the parts."""
        return self.language + self.vision + self.attention + self.head


def forward_flops(model_shape: ModelShape, *, counts: BatchCounts) -> Flops:
    """Count the matrix multiplications of one forward pass."""
    known = family(model_shape.family)
    widths = known.widths(model_shape.sizes)
    sums = {"vision": 0.0, "connector": 0.0, "language": 0.0, "head": 0.0}
    for parameter in model_shape.parameters:
        rows = _rows(parameter, widths=widths, counts=counts)
        sums[parameter.tower] += 2 * rows * math.prod(parameter.shape)
    if model_shape.tied_parameters:
        decoder = widths.decoder
        sums["head"] = 2.0 * counts.num_head_tokens * decoder.vocab_size * decoder.width
    return Flops(
        language=sums["language"],
        vision=sums["vision"] + sums["connector"],
        attention=sum(_attention(widths, counts=counts)),
        head=sums["head"],
    )


def train_flops(model_shape: ModelShape, *, counts: BatchCounts) -> float:
    """Count the matrix multiplications of forward and backward, without recomputing.

    A matrix that trains costs a second product, and one behind something that trains a third, for
    its input's gradient; what stands beside the first that trains is not behind it. Attention has
    no weights: it costs three times, or once. What no loss depends on is computed forward alone.
    """
    widths = family(model_shape.family).widths(model_shape.sizes)
    vision, language = _attention(widths, counts=counts)
    unused = _unused(model_shape)
    trained = {each.name for each in model_shape.trained}
    total, behind, reached, first_input = 0.0, False, set[str](), ""
    # A parameter of the connector outside of its modules is listed before the vision tower.
    for parameter in sorted(model_shape.parameters, key=lambda each: _ORDER.index(each.tower)):
        trains = parameter.name in trained
        read = input_name(parameter.name)
        passed = behind and parameter.name not in unused and read != first_input
        if _sees_pixels(parameter, widths=widths):
            passed = False
        rows = _rows(parameter, widths=widths, counts=counts)
        total += 2.0 * rows * math.prod(parameter.shape) * (1 + int(trains) + int(passed))
        if trains and not behind:
            behind, first_input = True, read
        if behind:
            reached.add(parameter.tower)
    if model_shape.tied_parameters:
        taught = int(not trained.isdisjoint(model_shape.tied_parameters.values()))
        decoder = widths.decoder
        head = 2.0 * counts.num_head_tokens * decoder.vocab_size * decoder.width
        total += head * (1 + taught + int(behind))
    busy = 2 * _busy_fraction(model_shape, unused=unused) * ("vision" in reached)
    return total + vision * (1 + busy) + language * (3 if "language" in reached else 1)


def recomputed_flops(
    model_shape: ModelShape, *, counts: BatchCounts, memory: MemoryOptions
) -> float:
    """Count what the backward pass computes a second time, where whole blocks are."""
    if memory.recompute != "blocks":
        return 0.0
    widths = family(model_shape.family).widths(model_shape.sizes)
    vision, language = _attention(widths, counts=counts)
    shares = {
        "vision": _share(widths.vision.num_layers, every=memory.vision_every),
        "language": _share(widths.decoder.num_layers, every=memory.language_every),
        "connector": float(memory.recompute_connector),
    }
    products = sum(
        2.0 * _rows(each, widths=widths, counts=counts) * math.prod(each.shape) * shares[each.tower]
        for each in model_shape.parameters
        if each.tower == "connector" or (each.block and each.tower in shares)
    )
    return products + vision * shares["vision"] + language * shares["language"]


def _share(num_layers: int, *, every: int) -> float:
    """Return how many of so many layers every k-th is, from the first on."""
    return math.ceil(num_layers / every) / num_layers if every and num_layers else 0.0


def with_windows(model_shape: ModelShape, *, counts: BatchCounts) -> BatchCounts:
    """Fill in the windows' patches squared, in a tower that has windows."""
    vision = family(model_shape.family).widths(model_shape.sizes).vision
    if not vision.num_windowed:
        return counts
    return replace(counts, squared_windows=_squared_windows(vision, counts=counts))


def _unused(model_shape: ModelShape) -> set[str]:
    """Name the parameters that no loss depends on."""
    patterns = family(model_shape.family).unused(model_shape.sizes)
    names = (each.name for each in model_shape.parameters)
    return {name for name in names if any(fnmatch.fnmatchcase(name, each) for each in patterns)}


def _busy_fraction(model_shape: ModelShape, *, unused: set[str]) -> float:
    """Return how much of the vision tower's blocks a loss depends on."""
    seen = [each for each in model_shape.parameters if each.tower == "vision" and each.block]
    blocks = {each.block for each in seen}
    return len({each.block for each in seen if each.name not in unused}) / max(1, len(blocks))


def _rows(parameter: Parameter, *, widths: Widths, counts: BatchCounts) -> float:
    """Count the rows that a matrix is multiplied by; 0 for what is none."""
    if len(parameter.shape) < 2 or parameter.name.endswith(_LOOKED_UP):
        return 0
    if parameter.tower == "language":
        return 0 if parameter.name.endswith("embed_tokens.weight") else counts.num_tokens
    if parameter.tower == "head":
        return counts.num_head_tokens
    vision = widths.vision
    if parameter.tower == "connector":
        return counts.num_patches / vision.merged
    num_tiles = counts.num_patches / vision.tile_patches if vision.tile_patches else 0
    if _POOLER in parameter.name:
        # One query looks at all patches' keys and values.
        of_pooler = (2 * counts.num_patches + num_tiles) / 3
        return of_pooler if parameter.name.endswith("in_proj_weight") else num_tiles
    if _sees_pixels(parameter, widths=widths):
        return counts.num_patches
    return counts.num_patches + vision.extra * num_tiles


def _sees_pixels(parameter: Parameter, *, widths: Widths) -> bool:
    """Tell whether a matrix reads pixels, whose gradient nothing asks for."""
    vision = widths.vision
    return (
        parameter.tower == "vision"
        and not parameter.block
        and math.prod(parameter.shape) == vision.patch_numbers * vision.width
        and "patch_embed" in parameter.name
    )


def _attention(widths: Widths, *, counts: BatchCounts) -> tuple[float, float]:
    """Count the products of queries with keys and of weights with values, in each tower."""
    decoder = widths.decoder
    language = 4.0 * decoder.num_layers * counts.squared_tokens * decoder.queries
    return _vision_attention(widths.vision, counts=counts), language


def _vision_attention(vision: VisionWidths, *, counts: BatchCounts) -> float:
    squared = counts.squared_patches
    if vision.tile_patches:
        num_tiles = counts.num_patches / vision.tile_patches
        squared = num_tiles * (vision.tile_patches + vision.extra) ** 2
    whole = vision.num_layers - vision.num_windowed
    windows = _squared_windows(vision, counts=counts) if vision.num_windowed else 0.0
    return 4.0 * vision.width * (whole * squared + vision.num_windowed * windows)


def _squared_windows(vision: VisionWidths, *, counts: BatchCounts) -> float:
    """Sum windows' patches squared; as if all images were one square where nobody counted them.

    The square is as large as the image that a patch is in, on average. A last window holds what is
    left over.
    """
    if counts.squared_windows is not None:
        return counts.squared_windows
    assert vision.window_side is not None, "layers with windows have a window"
    if not counts.num_patches:
        return 0.0
    image_side = math.sqrt(counts.squared_patches / counts.num_patches)
    full, left = divmod(image_side, vision.window_side)
    per_patch = (full * vision.window_side**2 + left**2) / image_side
    return counts.num_patches * per_patch**2
