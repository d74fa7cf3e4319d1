from __future__ import annotations

import torch

from diptych.model.attention import mask_segments


def test_a_token_sees_itself_and_what_came_before_it_in_its_sample():
    mask = mask_segments(torch.tensor([[1, 1, 2, 2, 0]], dtype=torch.int32))
    assert mask.shape == (1, 1, 5, 5)
    assert mask[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 0, 1, 0, 0],
        [0, 0, 1, 1, 0],
        [0, 0, 0, 0, 1],
    ]
