"""Which token may attend to which, where a row holds several samples.

In: the segment of every token. Out: a mask for `scaled_dot_product_attention`. Knows no model.
"""

from __future__ import annotations

import torch


def mask_segments(segment_ids_BS: torch.Tensor) -> torch.Tensor:
    """Let a token attend to itself and to what came before it in its own sample.

    Padding is a segment of its own (0), so that no row of the mask is empty.

    Args:
        segment_ids_BS: [B, S] integers, equal for the tokens of one sample.

    Returns:
        [B, 1, S, S] bool, True where the second S may be seen by the first.
    """
    num_tokens = segment_ids_BS.shape[1]
    same_BSS = segment_ids_BS[:, :, None] == segment_ids_BS[:, None, :]
    earlier_SS = torch.ones(
        (num_tokens, num_tokens), dtype=torch.bool, device=segment_ids_BS.device
    ).tril()
    return (same_BSS & earlier_SS)[:, None]
