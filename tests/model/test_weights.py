import pytest
import torch

from diptych.core.errors import ConfigError
from diptych.core.records import ModelSpec
from diptych.model.assemble import build


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
    with pytest.raises(ConfigError, match=r"no safetensors that can be read"):
        build(ModelSpec(weights=str(tmp_path)), tokens=token_ids, image=image_settings, seed=0)
