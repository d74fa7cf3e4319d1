import pytest

from diptych.core.records import ImageSettings, ModelSpec, TokenIds
from diptych.model.assemble import build

STARTER = {
    "text": {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
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
def model_spec():
    return ModelSpec(sizes=STARTER)


@pytest.fixture(scope="session")
def image_settings():
    return ImageSettings(
        patch_px=8, merge=2, temporal_patch=2, min_area_px=32 * 32, max_area_px=256 * 256
    )


@pytest.fixture(scope="session")
def token_ids():
    return TokenIds(num_tokens=500, pad=0, eos=1, image=2, video=3, vision_start=4, vision_end=5)


@pytest.fixture(scope="session")
def starter_model(image_settings, token_ids):
    return build(ModelSpec(sizes=STARTER), tokens=token_ids, image=image_settings, seed=3)
