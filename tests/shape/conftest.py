import pytest

from diptych.core.records import ImageSettings, TokenIds

STARTER = {
    "text": {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
    },
    "vision": {
        "depth": 4,
        "hidden_size": 128,
        "num_heads": 4,
        "intermediate_size": 384,
        "patch_size": 8,
        "num_position_embeddings": 256,
        "deepstack_visual_indexes": [1, 2],
    },
}


@pytest.fixture
def starter_sizes():
    return {group: dict(values) for group, values in STARTER.items()}


@pytest.fixture
def image_settings():
    return ImageSettings(
        patch_px=8, merge=2, temporal_patch=2, min_area_px=32 * 32, max_area_px=256 * 256
    )


@pytest.fixture
def token_ids():
    return TokenIds(num_tokens=500, pad=0, eos=1, image=2, video=3, vision_start=4, vision_end=5)
