"""Which token of a row may see which, and that in the form each kernel takes.

In: what a family's layers may see, the ids and segments of a micro-batch. Out: nothing where causal
attention is all, a boolean mask, a block mask, or the lengths of what stands in the rows. One
predicate is behind all of them. Which kernel runs is unknown here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers import PreTrainedConfig

Sees = Callable[[Any, Any, Any, Any], torch.Tensor]
"""Of a row's number, a head's, a query's and a key's: may this query see that key. Torch's form."""

_ONE_KIND, _SLIDING = "", "sliding_attention"


@dataclass(frozen=True)
class MaskRule:
    """What a family's layers may see beside a token itself and what came before it.

    Attributes:
        windows: for each kind of layer how many tokens back it sees, itself included; None: all.
            A model with one kind of layers has no names for them.
        image_token_id: tokens of this id that stand together see each other; None: none do.
    """

    windows: Mapping[str, int | None] = field(default_factory=lambda: {_ONE_KIND: None})
    image_token_id: int | None = None

    def each(self, make: Callable[[int | None], Any]) -> Any:
        """Make a mask of every kind of layers' window: one alone, or by the kind's name."""
        if self.windows.keys() == {_ONE_KIND}:
            return make(self.windows[_ONE_KIND])
        return {kind: make(window) for kind, window in self.windows.items()}


def windows_of(text: PreTrainedConfig) -> dict[str, int | None]:
    """Read the windows of a decoder's kinds of layers out of its config, as `MaskRule` has them."""
    kinds: list[str] = getattr(text, "layer_types", None) or []
    window: int | None = getattr(text, "sliding_window", None)
    if _SLIDING in kinds:
        return {kind: window if kind == _SLIDING else None for kind in sorted(set(kinds))}
    # One mask for all layers, where a config names no kinds.
    return {_ONE_KIND: None if kinds else window}


def sees(
    rule: MaskRule,
    *,
    window: int | None,
    input_ids_BS: torch.Tensor,
    segment_ids_BS: torch.Tensor | None,
) -> Sees:
    """Say which token may see which, in one kind of layers.

    Padding is a segment of its own (0), so that there is no token which sees none.

    Args:
        rule: the family's.
        window: how many tokens back, the token itself included; None: all.
        input_ids_BS: [B, S] int64.
        segment_ids_BS: [B, S] integers, equal for the tokens of one sample; None: a row is one.
    """
    blocks_BS = None
    if rule.image_token_id is not None:
        blocks_BS = number_images(input_ids_BS, image_token_id=rule.image_token_id)

    def may(row: Any, head: Any, query: Any, key: Any) -> torch.Tensor:
        seen = key <= query
        if blocks_BS is not None:
            block = blocks_BS[row, query]
            seen = seen | ((block == blocks_BS[row, key]) & (block >= 0))
        if window is not None:
            seen = seen & (key > query - window)
        if segment_ids_BS is not None:
            seen = seen & (segment_ids_BS[row, query] == segment_ids_BS[row, key])
        return seen

    return may


def number_images(input_ids_BS: torch.Tensor, *, image_token_id: int) -> torch.Tensor:
    """Number the images of each row, [B, S] int64: tokens that stand together, -1 beside them.

    Source: `get_block_sequence_ids_for_mask` of transformers' Gemma 3.
    """
    is_image_BS = input_ids_BS == image_token_id
    before_BS = functional.pad(is_image_BS, (1, 0))[:, :-1]
    numbers_BS = torch.cumsum(is_image_BS & ~before_BS, dim=1) - 1
    return torch.where(is_image_BS, numbers_BS, -1)


def dense(
    rule: MaskRule, *, input_ids_BS: torch.Tensor, segment_ids_BS: torch.Tensor | None
) -> torch.Tensor | dict[str, torch.Tensor] | None:
    """Write the masks out for `scaled_dot_product_attention`.

    Returns:
        [B, 1, S, S] bool, True where the second S may be seen by the first, or such by kind of
        layers; None where transformers makes the same: rows of one sample, and no image looked
        ahead in.
    """
    if rule.image_token_id is None and segment_ids_BS is None:
        return None
    num_rows, num_tokens = input_ids_BS.shape
    device = input_ids_BS.device
    rows = torch.arange(num_rows, device=device)[:, None, None, None]
    tokens = torch.arange(num_tokens, device=device)
    queries, keys = tokens[:, None], tokens[None, :]

    def make(window: int | None) -> torch.Tensor:
        may = sees(rule, window=window, input_ids_BS=input_ids_BS, segment_ids_BS=segment_ids_BS)
        found = may(rows, None, queries[None, None], keys[None, None])
        return found.expand(num_rows, 1, num_tokens, num_tokens)

    return rule.each(make)


def blocks(
    rule: MaskRule, *, input_ids_BS: torch.Tensor, segment_ids_BS: torch.Tensor | None
) -> BlockMask | dict[str, BlockMask]:
    """Make the masks of FlexAttention, which leaves out blocks that nobody sees."""
    num_rows, num_tokens = input_ids_BS.shape

    def make(window: int | None) -> BlockMask:
        may = sees(rule, window=window, input_ids_BS=input_ids_BS, segment_ids_BS=segment_ids_BS)
        return create_block_mask(
            may,
            B=num_rows,
            H=None,
            Q_LEN=num_tokens,
            KV_LEN=num_tokens,
            device=input_ids_BS.device,
            # Compiled, it never holds a number for every pair of tokens; that takes a compiler.
            _compile=input_ids_BS.is_cuda,
        )

    return rule.each(make)


def lengths(
    *, input_ids_BS: torch.Tensor, segment_ids_BS: torch.Tensor | None
) -> dict[str, torch.Tensor | int]:
    """Write where samples begin, as Flash Attention's kernels for ragged rows take it.

    Rows stand one behind the other, padding a sample of its own.

    Returns:
        Keywords of the model's body: the cumulative lengths of queries and keys, [samples + 1]
        int32, from 0 to B times S, and the largest length there can be, that of a row.
    """
    num_rows, num_tokens = input_ids_BS.shape
    begins_BS = torch.zeros_like(input_ids_BS, dtype=torch.bool)
    begins_BS[:, 0] = True
    if segment_ids_BS is not None:
        begins_BS[:, 1:] = segment_ids_BS[:, 1:] != segment_ids_BS[:, :-1]
    starts = begins_BS.flatten().nonzero()[:, 0]
    # Read by every layer, and written here once.
    ends = functional.pad(starts, (0, 1), value=num_rows * num_tokens).to(torch.int32)
    return {
        "cu_seq_lens_q": ends,
        "cu_seq_lens_k": ends,
        "max_length_q": num_tokens,
        "max_length_k": num_tokens,
    }
