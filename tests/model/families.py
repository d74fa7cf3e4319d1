"""Small models of several families: a name in, a config with every part of the family out."""

from __future__ import annotations

from typing import Any

_TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 8,
}


def config_of(family: str) -> Any:
    """Return a config that makes a model of some ten thousand parameters."""
    import transformers

    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
    siglip = {"model_type": "siglip_vision_model", **_TOWER}
    made: dict[str, dict[str, Any]] = {
        "llava": {
            "text_config": {"model_type": "llama", **_TEXT},
            "vision_config": {"model_type": "clip_vision_model", "projection_dim": 16, **_TOWER},
        },
        "llava_onevision": {
            "text_config": {"model_type": "qwen2", **_TEXT},
            "vision_config": siglip,
            "vision_feature_layer": -1,
        },
        "gemma3": {
            "text_config": {**_TEXT, "sliding_window": 8, "query_pre_attn_scalar": 8},
            "vision_config": siglip,
            "mm_tokens_per_image": 1,
        },
        "qwen2_5_vl": {
            "text_config": {**_TEXT, "rope_parameters": rope},
            "vision_config": {
                "depth": 2,
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_heads": 4,
                "out_hidden_size": 32,
                "fullatt_block_indexes": [1],
                "patch_size": 8,
                "window_size": 32,
            },
        },
        "internvl": {
            "text_config": {"model_type": "qwen2", **_TEXT},
            "vision_config": {**_TOWER, "image_size": [16, 16], "patch_size": [8, 8]},
        },
        "smolvlm": {
            "text_config": {"model_type": "llama", **_TEXT, "pad_token_id": 1},
            "vision_config": _TOWER,
            "scale_factor": 2,
        },
    }
    kind = transformers.CONFIG_MAPPING[family]
    return kind(**made[family])
