import pytest
from transformers import Qwen3VLConfig

from diptych.core.errors import ConfigError
from diptych.shape.families import family
from diptych.shape.qwen3_vl_sizes import TextSizes, VisionSizes, complete

QWEN = family("qwen3_vl")


def test_defaults_are_those_of_transformers():
    config = Qwen3VLConfig()
    text = config.text_config.to_dict()
    text["rope_theta"] = text["rope_parameters"]["rope_theta"]
    text["mrope_section"] = [24, 20, 20]
    vision = config.vision_config.to_dict()
    vision["rope_theta"] = vision["rope_parameters"]["rope_theta"]
    for ours, theirs in ((TextSizes(), text), (VisionSizes(), vision)):
        for name, value in ours.model_dump(mode="json").items():
            assert theirs[name] == value, name


def test_absent_sizes_are_derived(starter_sizes):
    starter_sizes["text"]["num_key_value_heads"] = None
    found = complete(starter_sizes)
    assert found["text"]["head_dim"] == 32
    assert found["text"]["num_key_value_heads"] == 4
    assert found["vision"]["out_hidden_size"] == 128
    assert complete(found) == found


@pytest.mark.parametrize(
    ("head_dim", "sections"),
    [(128, [24, 20, 20]), (64, [12, 10, 10]), (32, [6, 5, 5]), (16, [4, 2, 2]), (6, [1, 1, 1])],
)
def test_rotary_sections_fit_the_head(starter_sizes, head_dim, sections):
    starter_sizes["text"]["head_dim"] = head_dim
    assert complete(starter_sizes)["text"]["mrope_section"] == sections


@pytest.mark.parametrize(
    ("group", "name", "value", "message"),
    [
        ("text", "hiden_size", 64, "'hiden_size'.*Did you mean 'hidden_size'"),
        ("vision", "num_head", 4, "'num_head'.*Did you mean 'num_heads'"),
        ("text", "hidden_size", "wide", "text.hidden_size is 'wide'.*valid integer"),
        ("text", "num_hidden_layers", 0, "text.num_hidden_layers is 0.*greater than 0"),
        ("text", "num_attention_heads", 3, "128 is no multiple of num_attention_heads 3"),
        ("text", "num_key_value_heads", 3, "4 is no multiple of num_key_value_heads 3"),
        ("text", "head_dim", 33, "head_dim is 33.*even"),
        ("text", "mrope_section", [8, 4, 5], r"\[8, 4, 5\] does not fit head_dim 32.*sum to 16"),
        ("vision", "out_hidden_size", 64, "out_hidden_size is 64, text.hidden_size is 128"),
        ("vision", "num_heads", 64, "128 over num_heads 64 is no multiple of 4"),
        ("vision", "num_position_embeddings", 200, "200 is no square"),
        ("vision", "deepstack_visual_indexes", [1, 4], r"\[1, 4\].*from 0 to 3"),
        ("vision", "deepstack_visual_indexes", [2, 1], r"\[2, 1\].*ascending"),
    ],
)
def test_sizes_that_cannot_work_are_refused(starter_sizes, group, name, value, message):
    starter_sizes[group][name] = value
    with pytest.raises(ConfigError, match=message):
        complete(starter_sizes)


def test_unknown_group_names_the_nearest():
    with pytest.raises(ConfigError, match=r"'visoin'.*Did you mean 'vision'"):
        complete({"visoin": {}})


def test_processor_that_fits_is_accepted(starter_sizes, image_settings, token_ids):
    QWEN.check(starter_sizes, image=image_settings, tokens=token_ids)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("patch_px", 14, "patch_size is 8, the processor's is 14"),
        ("merge", 4, "spatial_merge_size is 2, the processor's is 4"),
        ("temporal_patch", 1, "temporal_patch_size is 2, the processor's is 1"),
    ],
)
def test_processor_with_other_patches_is_refused(
    starter_sizes, image_settings, token_ids, field, value, message
):
    other = image_settings.model_copy(update={field: value})
    with pytest.raises(ConfigError, match=message):
        QWEN.check(starter_sizes, image=other, tokens=token_ids)


@pytest.mark.parametrize("update", [{"num_tokens": 513}, {"image": 512}])
def test_tokenizer_larger_than_the_vocabulary_is_refused(
    starter_sizes, image_settings, token_ids, update
):
    with pytest.raises(ConfigError, match="513 tokens, the model's vocab_size is 512"):
        QWEN.check(starter_sizes, image=image_settings, tokens=token_ids.model_copy(update=update))
