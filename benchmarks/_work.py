"""The work that every loop of the benchmark `loop` does: a small model and its batches.

The model is so small that what a loop adds to a step can be seen beside it.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from diptych.core.records import ImageSettings, ModelSpec, TokenIds
from diptych.data.collate import MicroBatch
from diptych.model.assemble import build
from diptych.shape.families import family

NUM_BATCHES = 16
IMAGE = ImageSettings(patch_px=8, merge=2, temporal_patch=1, min_area_px=256, max_area_px=4096)
TOKENS = TokenIds(num_tokens=256, pad=0, eos=1, image=2, video=3, vision_start=4, vision_end=5)
MODEL = ModelSpec(
    sizes={
        "text": {
            "vocab_size": 256,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 32,
        },
        "vision": {
            "depth": 1,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 2,
            "patch_size": 8,
            "temporal_patch_size": 1,
            "deepstack_visual_indexes": [0],
            "num_position_embeddings": 64,
        },
    },
    tie_word_embeddings=False,
)


def make_model() -> nn.Module:
    """Build the model; its weights are the same at every call."""
    return build(MODEL, tokens=TOKENS, image=IMAGE, seed=0)


def make_batches() -> list[MicroBatch]:
    """Make `NUM_BATCHES` micro-batches of four rows: an image of 4 x 4 patches, then text."""
    generator = np.random.default_rng(0)
    shape = family(MODEL.family)
    grid, num_rows = (4, 4), 4
    num_image_tokens = grid[0] * grid[1] // IMAGE.merge**2
    batches = []
    for number in range(NUM_BATCHES):
        num_text = 24 + number % 8
        head = [TOKENS.vision_start, *[TOKENS.image] * num_image_tokens, TOKENS.vision_end]
        text_BS = generator.integers(8, TOKENS.num_tokens, size=(num_rows, num_text))
        ids_BS = np.concatenate([np.tile(head, (num_rows, 1)), text_BS], axis=1)
        labels_BS = np.where(np.arange(ids_BS.shape[1]) >= ids_BS.shape[1] - 6, ids_BS, -100)
        positions_3BS = np.stack(
            [
                shape.position_ids(row, grids=[grid], image=IMAGE, image_token_id=TOKENS.image)
                for row in ids_BS
            ],
            axis=1,
        )
        patches_PD = generator.normal(size=(num_rows * grid[0] * grid[1], 3 * IMAGE.patch_px**2))
        batches.append(
            MicroBatch(
                input_ids_BS=torch.from_numpy(ids_BS),
                labels_BS=torch.from_numpy(labels_BS),
                position_ids_3BS=torch.from_numpy(positions_3BS),
                segment_ids_BS=None,
                source_ids_BS=torch.zeros(ids_BS.shape, dtype=torch.int16),
                pixel_values_PD=torch.from_numpy(patches_PD).float(),
                grid_thw_I3=torch.tensor([[1, *grid]] * num_rows),
                num_rows=num_rows,
                num_samples=num_rows,
                num_label_tokens=6 * num_rows,
                num_text_tokens=num_rows * (num_text + 2),
                num_image_tokens=num_rows * num_image_tokens,
                num_patches=len(patches_PD),
                num_slots=ids_BS.size,
                num_samples_by_source=np.array([num_rows]),
                num_label_tokens_by_source=np.array([6 * num_rows]),
            )
        )
    return batches
