import pytest
import torch

from diptych.core.errors import ConfigError
from diptych.core.records import ModelSpec
from diptych.model.assemble import build
from diptych.model.weights import read_config


def test_weights_are_loaded_from_a_folder(starter_model, tmp_path, token_ids, image_settings):
    starter_model.save_pretrained(tmp_path)
    spec = ModelSpec(weights=str(tmp_path))
    loaded = build(spec, tokens=token_ids, image=image_settings, seed=9)
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}
    for name, weight in starter_model.state_dict().items():
        assert torch.equal(weight, loaded.state_dict()[name]), name


def test_weights_with_other_tokens_are_refused(starter_model, tmp_path, token_ids, image_settings):
    starter_model.config.save_pretrained(tmp_path)
    other = token_ids.model_copy(update={"image": 8})
    with pytest.raises(ConfigError, match="image_token_id is 2, the processor's is 8"):
        build(ModelSpec(weights=str(tmp_path)), tokens=other, image=image_settings, seed=None)


def test_pickled_weights_are_refused(starter_model, tmp_path, token_ids, image_settings):
    """A pickle runs code when it is read."""
    starter_model.config.save_pretrained(tmp_path)
    torch.save(starter_model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"no safetensors, but pytorch_model\.bin"):
        build(ModelSpec(weights=str(tmp_path)), tokens=token_ids, image=image_settings, seed=0)


def test_weights_of_another_family_are_refused(starter_model, tmp_path):
    starter_model.config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="of the family 'qwen3_vl'"):
        read_config(ModelSpec(family="llava", weights=str(tmp_path)))


def test_weights_bring_their_own_sizes(starter_model, tmp_path, model_spec):
    starter_model.config.save_pretrained(tmp_path)
    spec = model_spec.model_copy(update={"weights": str(tmp_path)})
    with pytest.raises(ConfigError, match=r"both sizes and the weights.*sizes: null"):
        read_config(spec)


def test_a_special_token_beyond_the_tokenizer_needs_a_row(token_ids):
    assert token_ids.num_embeddings == 500
    assert token_ids.model_copy(update={"pad": 510}).num_embeddings == 511
