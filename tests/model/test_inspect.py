import pytest

from diptych.core.errors import ConfigError
from diptych.core.records import ModelSpec, TokenIds
from diptych.model.families import torch_side
from diptych.model.inspect import inspect
from tests.families.cases import CASES

TIED = {"lm_head.weight": "model.language_model.embed_tokens.weight"}


def test_model_shape_lists_the_starter_model(model_spec, starter_model):
    shape = inspect(model_spec)
    assert shape.family == "qwen3_vl"
    assert shape.tied_parameters == TIED
    assert shape.num_parameters == sum(p.numel() for p in starter_model.parameters())
    assert shape.sizes["text"]["head_dim"] == 32
    assert {p.dtype for p in shape.parameters} == {"float32"}


def test_untied_head_is_a_parameter_of_its_own(model_spec):
    shape = inspect(model_spec.model_copy(update={"tie_word_embeddings": False}))
    assert shape.tied_parameters == {}
    assert [p.name for p in shape.parameters if p.tower == "head"] == ["lm_head.weight"]


def test_weights_folder_is_read_by_its_config(starter_model, model_spec, tmp_path):
    starter_model.config.save_pretrained(tmp_path)
    spec = ModelSpec(weights=str(tmp_path))
    assert inspect(spec) == inspect(model_spec)


def test_weights_beside_sizes_are_refused(model_spec, tmp_path):
    spec = model_spec.model_copy(update={"weights": str(tmp_path)})
    with pytest.raises(ConfigError, match="both sizes and the weights"):
        inspect(spec)


def test_folder_without_config_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"plan\.model\.weights is .*config\.json"):
        inspect(ModelSpec(weights=str(tmp_path)))


def test_weights_of_another_family_are_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigError, match="of the family 'llama'"):
        inspect(ModelSpec(weights=str(tmp_path)))


def test_unknown_family_is_refused():
    with pytest.raises(ConfigError, match="Did you mean 'qwen3_vl'"):
        inspect(ModelSpec(family="qwen3vl"))


@pytest.mark.parametrize("name", ["qwen2_5_vl", "smolvlm"])
def test_a_decoder_s_config_names_no_token_that_it_lacks(name, caplog):
    """transformers' defaults are those of a large vocabulary, and it warns of them."""
    model = CASES[name].model
    tokens = TokenIds(num_tokens=9, pad=0, eos=2, image=5, video=6, vision_start=3, vision_end=4)
    inspect(model)
    config = torch_side(name).config_of(model.sizes, tie_word_embeddings=True, tokens=tokens)
    assert (config.text_config.bos_token_id, config.text_config.eos_token_id) == (None, 2)
    assert not caplog.records


@pytest.mark.parametrize(
    ("group", "sizes", "found"),
    [
        ("vision", {"num_attention_heads": 5}, "embed_dim must be divisible by num_heads"),
        ("vision", {"patch_size": 0}, "makes no model"),
        ("vision", {"model_type": "vit"}, "model_type is 'vit'.*siglip_vision_model"),
        ("text", {"model_type": "bert", "num_key_value_heads": None, "head_dim": None}, "no model"),
        ("model", {"vision_feature_layer": -5}, r"layer is -5.*-4 to 3"),
        ("model", {"vision_feature_layer": [3, 4]}, r"layer is 4.*-4 to 3"),
        ("model", {"vision_feature_select_strategy": "default"}, "has none.*Set it to full"),
    ],
)
def test_towers_that_do_not_fit_are_refused(group, sizes, found):
    spec = CASES["siglip + qwen3"].model
    changed = {**spec.sizes, group: {**spec.sizes[group], **sizes}}
    with pytest.raises(ConfigError, match=found):
        inspect(spec.model_copy(update={"sizes": changed}))
