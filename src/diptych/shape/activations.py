"""Bytes that a micro-batch holds at the peak of its backward pass, as an estimate.

A model's shape, counts, a precision and the memory options in, bytes out. Counted from what
autograd saves in transformers' Qwen3-VL with fused attention; other families' layers differ by a
vector or two. In bf16 and fp16, norms and the decoder's hidden states stay fp32.
"""

from __future__ import annotations

from dataclasses import dataclass

from diptych.core.records import Dtype, MemoryOptions, ModelShape
from diptych.shape.counts import BatchCounts
from diptych.shape.families import family
from diptych.shape.widths import DecoderWidths, VisionWidths


@dataclass(frozen=True)
class _Tower:
    """Bytes of a tower, for the tokens or patches of the whole micro-batch.

    Attributes:
        num_blocks: how many blocks it has.
        every: which of them recompute: every so many, 0 none.
        whole: what one block keeps for its backward pass.
        kept: what it keeps if it recomputes.
        in_flight: gradients while it goes backward.
        around: what is kept outside of the blocks.
    """

    num_blocks: int
    every: int
    whole: float
    kept: float
    in_flight: float
    around: float

    @property
    def held(self) -> float:
        """What it keeps when its forward pass is over."""
        recomputing = -(-self.num_blocks // self.every) if self.every else 0
        return self.around + (
            recomputing * self.kept + (self.num_blocks - recomputing) * self.whole
        )

    @property
    def passing(self) -> float:
        """What comes on top while one block goes backward."""
        return self.in_flight + (self.whole - self.kept if self.every else 0.0)


def activation_bytes(
    model_shape: ModelShape,
    *,
    counts: BatchCounts,
    precision: Dtype,
    memory: MemoryOptions = MemoryOptions(),  # noqa: B008 - frozen
) -> float:
    """Return the most of three moments: the head, a decoder layer, a vision block goes backward.

    On the device, where activations are offloaded: what autograd saves, or what recomputing
    leaves of it, and the gradients in flight of one layer.
    """
    widths = family(model_shape.family).widths(model_shape.sizes)
    text = widths.decoder
    decoder = _decoder(text, counts=counts, precision=precision, memory=memory)
    tower = _vision(widths.vision, counts=counts, precision=precision, memory=memory)
    head = _head(text, num_labels=counts.num_head_tokens, precision=precision, memory=memory)
    # The head's weight is the embedding's too: its gradient waits for the end of the backward pass.
    waiting = 4 * text.vocab_size * text.width
    if memory.offload_activations:
        # One block's, on their way out or back in.
        return max(
            head + decoder.around,
            waiting + max(each.whole + each.in_flight for each in (decoder, tower)),
        )
    if memory.recompute == "none":
        # The head's gradients are still there when the last layer's are made.
        return decoder.held + tower.held + head + decoder.passing
    return tower.held + max(
        decoder.held + max(head, waiting + decoder.passing), waiting + tower.passing
    )


def _decoder(
    text: DecoderWidths, *, counts: BatchCounts, precision: Dtype, memory: MemoryOptions
) -> _Tower:
    """Count decoder layers.

    Each keeps six vectors of its width (two norms, three each), four of the queries' and of the
    keys' (projection, norm, rotated, value or output) and four of the MLP's.
    """
    element, norms, heads = (4, 24, 16) if precision == "fp32" else (2, 26, 10)
    width, inner, queries, keys = text.width, text.inner, text.queries, text.keys
    mlp = element * inner
    # The results of seven products and of attention.
    products = element * (2 * queries + 2 * keys + 2 * width + 2 * inner)
    kept = 4 * width + (products if memory.recompute == "operators" else 0)
    # The embedding, the final norm and each DeepStack sum.
    around = 4 * (3 + text.num_added) * width
    return _Tower(
        num_blocks=text.num_layers,
        every=memory.language_every if memory.recompute != "none" else 0,
        whole=counts.num_tokens * (norms * width + heads * (queries + keys) + 4 * mlp),
        kept=counts.num_tokens * kept,
        in_flight=counts.num_tokens * 3 * mlp,
        around=counts.num_tokens * around,
    )


def _vision(
    vision: VisionWidths, *, counts: BatchCounts, precision: Dtype, memory: MemoryOptions
) -> _Tower:
    """Count vision blocks, which keep eleven vectors of their width and two of the MLP's."""
    element, vectors = (4, 44) if precision == "fp32" else (2, 24)
    width, inner = vision.width, vision.inner
    # A gated MLP keeps both of its factors and what they make.
    inners = 4 if vision.is_gated else 2
    products = element * (6 * width + inner)
    kept = element * width + (products if memory.recompute == "operators" else 0)
    recomputes = memory.recompute != "none"
    merger = 4 if recomputes and memory.recompute_connector else 16
    around = 4 * vision.patch_numbers + merger * width * vision.num_connectors
    return _Tower(
        num_blocks=vision.num_layers,
        every=memory.vision_every if recomputes else 0,
        whole=counts.num_patches * (vectors * width + inners * element * inner),
        kept=counts.num_patches * kept,
        in_flight=counts.num_patches * inners * element * inner,
        around=counts.num_patches * around,
    )


def _head(
    text: DecoderWidths, *, num_labels: float, precision: Dtype, memory: MemoryOptions
) -> float:
    """Count the head: one vocabulary for each label, and two more to go backward.

    In chunks it has one chunk's logits (fp32, and as they come out of the product), and gradients
    of its weight and of the hidden states until the backward pass takes them.
    """
    width, words = text.width, text.vocab_size
    if memory.loss == "whole":
        return num_labels * (12 * words + 4 * width)
    gradients = 4 * words * width + num_labels * 8 * width
    if memory.loss == "fused":
        # Liger's chunks hold as many logits as all labels have hidden states.
        return gradients + num_labels * 4 * width
    element = 4 if precision == "fp32" else 6
    return gradients + element * min(num_labels, memory.loss_chunk_tokens) * words
