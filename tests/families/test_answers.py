"""Questions about no, one and several images in one batch are answered as each alone."""

from __future__ import annotations

import numpy as np
from PIL import Image

from diptych.evaluate.generate import answer

NUM_NEW_TOKENS = 8


def test_a_batch_is_answered_as_each_question_alone(prepared):
    model = prepared.build()
    # Logits far apart: padding rounds them otherwise.
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 and "embed_tokens" not in name:
            parameter.requires_grad_(False).mul_(3)
    pixels = np.random.default_rng(0)
    sizes = [[], [(40, 80)], [(32, 32), (90, 30)], [(64, 20)]]
    images = [
        [Image.fromarray(pixels.integers(0, 256, (*size, 3), dtype=np.uint8)) for size in row]
        for row in sizes
    ]
    chats = [
        [
            {
                "role": "user",
                "content": [
                    *({"type": "image"} for _ in row),
                    {"type": "text", "text": "Which number is written here? " * (1 + len(row))},
                ],
            }
        ]
        for row in images
    ]
    given = {"processor": prepared.processor, "max_new_tokens": NUM_NEW_TOKENS}
    together = answer(model, conversations=chats, images=images, **given)
    alone = [
        answer(model, conversations=[chat], images=[row], **given)[0]
        for chat, row in zip(chats, images, strict=True)
    ]
    assert together == alone
    assert len(set(together)) > 1
