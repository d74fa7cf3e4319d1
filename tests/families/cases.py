"""Every family that is built, as a model small enough for tests and a processor that fits it.

A new family is one more entry; every test of this folder then asks of it what it asks of all.
"""

from __future__ import annotations

from dataclasses import dataclass

from diptych.core.records import ModelSpec
from diptych.data.processor import ProcessorParams
from tests.conftest import TINY_MODEL

DECODER = {
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 2048,
}
QWEN2_DECODER = {name: value for name, value in DECODER.items() if name != "head_dim"}
TOWER = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}


@dataclass(frozen=True)
class Case:
    """A family, or a composition of towers."""

    model: ModelSpec
    processor: ProcessorParams


CASES = {
    "qwen3_vl": Case(TINY_MODEL, ProcessorParams()),
    "qwen2_5_vl": Case(
        ModelSpec(
            family="qwen2_5_vl",
            sizes={
                "text": {name: size for name, size in DECODER.items() if name != "head_dim"},
                "vision": {
                    "depth": 3,
                    "hidden_size": 32,
                    "intermediate_size": 64,
                    "num_heads": 2,
                    "patch_size": 8,
                    "temporal_patch_size": 1,
                    # Two tokens a side, so that most images have several windows.
                    "window_size": 32,
                    "fullatt_block_indexes": [1],
                },
            },
        ),
        ProcessorParams(family="qwen2_5_vl"),
    ),
    "llava": Case(
        ModelSpec(
            family="llava",
            sizes={
                "text": {"model_type": "llama", **DECODER},
                "vision": {"model_type": "clip_vision_model", **TOWER},
                "model": {"vision_feature_select_strategy": "default"},
            },
            tie_word_embeddings=False,
        ),
        ProcessorParams(family="llava", tile_px=32, patch_px=8),
    ),
    "smolvlm": Case(
        ModelSpec(
            family="smolvlm",
            sizes={"text": DECODER, "vision": TOWER, "model": {"scale_factor": 2}},
        ),
        ProcessorParams(family="smolvlm", tile_px=32, patch_px=8, max_side_px=96),
    ),
    "siglip + qwen3": Case(
        ModelSpec(
            family="llava",
            sizes={
                "text": {"model_type": "qwen3", **DECODER},
                "vision": {"model_type": "siglip_vision_model", **TOWER},
                "model": {
                    "vision_feature_select_strategy": "full",
                    "vision_feature_layer": -1,
                },
            },
        ),
        ProcessorParams(family="llava", tile_px=32, patch_px=8),
    ),
    "clip + qwen3": Case(
        ModelSpec(
            family="llava",
            sizes={
                "text": {"model_type": "qwen3", **DECODER},
                "vision": {"model_type": "clip_vision_model", **TOWER},
                "model": {"vision_feature_select_strategy": "default"},
            },
        ),
        ProcessorParams(family="llava", tile_px=32, patch_px=8),
    ),
    "internvl": Case(
        ModelSpec(
            family="internvl",
            sizes={
                "text": {"model_type": "qwen2", **QWEN2_DECODER},
                "vision": TOWER,
            },
        ),
        ProcessorParams(family="internvl", tile_px=32, patch_px=8, max_tiles=6),
    ),
    "internvl, earlier layer": Case(
        ModelSpec(
            family="internvl",
            sizes={
                "text": {"model_type": "qwen3", **DECODER},
                "vision": {
                    **TOWER,
                    "norm_type": "rms_norm",
                    "use_qk_norm": True,
                    "use_mask_token": True,
                    "use_mean_pooling": False,
                },
                "model": {"vision_feature_layer": -2},
            },
            tie_word_embeddings=False,
        ),
        ProcessorParams(family="internvl", tile_px=32, patch_px=8),
    ),
    "llava_onevision": Case(
        ModelSpec(
            family="llava_onevision",
            sizes={
                "text": {"model_type": "qwen2", **QWEN2_DECODER},
                "vision": {"model_type": "siglip_vision_model", "vision_use_head": False, **TOWER},
                "model": {"vision_aspect_ratio": "anyres_max_4"},
            },
            tie_word_embeddings=False,
        ),
        ProcessorParams(family="llava_onevision", tile_px=32, patch_px=8, max_tiles=4),
    ),
    # The window is shorter than an image's 16 tokens.
    "gemma3": Case(
        ModelSpec(
            family="gemma3",
            sizes={
                "text": {
                    **DECODER,
                    "query_pre_attn_scalar": 16,
                    "sliding_window": 12,
                    "layer_types": ["sliding_attention", "full_attention"],
                },
                "vision": {**TOWER, "image_size": 64},
                "model": {"mm_tokens_per_image": 16},
            },
        ),
        ProcessorParams(family="gemma3", tile_px=64, patch_px=8, merge=2),
    ),
}
