"""What is missing, extra or misshapen is listed, and refused unless it is named."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from diptych.core.errors import ConfigError
from diptych.core.records import ModelSpec
from diptych.model.names import match
from diptych.model.streaming import outline
from diptych.model.tensor_files import TensorFiles
from tests.model.families import config_of

ATTENTION = {"": "sdpa", "text_config": "sdpa", "vision_config": "sdpa"}
UP = "model.language_model.layers.0.mlp.up_proj.weight"
PROJECTOR = "model.multi_modal_projector"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A small llava's folder, in the layout of its model."""
    from transformers import AutoModelForImageTextToText

    folder = tmp_path_factory.mktemp("llava")
    model = AutoModelForImageTextToText.from_config(config_of("llava"))
    model.config.save_pretrained(folder)
    save_file(model.state_dict(), folder / "model.safetensors")
    return folder


@pytest.fixture
def changed(saved, tmp_path):
    """Write the folder anew with other tensors, and match it."""

    def change(edit=lambda tensors: None, **settings):
        tensors = load_file(saved / "model.safetensors")
        edit(tensors)
        save_file(tensors, tmp_path / "model.safetensors")
        model = outline(config_of("llava"), attention=ATTENTION)
        spec = ModelSpec(family="llava", weights=str(tmp_path), **settings)
        return match(model, files=TensorFiles(tmp_path), spec=spec)

    return change


def test_a_model_s_own_names_need_no_setting(changed):
    found = changed()
    assert found.direct[UP] == UP
    assert not found.missing


def test_missing_weights_are_counted_listed_and_refused(changed):
    def drop(tensors):
        for name in [name for name in tensors if ".mlp." in name]:
            del tensors[name]

    # Three matrices in two layers of the decoder, two layers of two biased ones in the tower.
    with pytest.raises(ConfigError, match=r"14 missing: .* and 9 more.*plan\.model\.allow_missing"):
        changed(drop)


def test_extra_weights_are_counted_listed_and_refused(changed):
    def add(tensors):
        tensors["model.more.weight"] = torch.zeros(2)

    with pytest.raises(
        ConfigError, match=r"1 extra: model\.more\.weight.*plan\.model\.allow_extra"
    ):
        changed(add)
    assert changed(add, allow_extra=("model.more.*",)).direct[UP] == UP


def test_misshapen_weights_are_listed_and_no_setting_allows_them(changed):
    def turn(tensors):
        tensors[UP] = tensors[UP].t().contiguous()

    with pytest.raises(ConfigError, match=r"1 of another shape: .* is \[32, 48\].*\[48, 32\]"):
        changed(turn)


def test_all_kinds_are_in_one_message(changed):
    def break_all(tensors):
        del tensors[f"{PROJECTOR}.linear_1.bias"]
        tensors["model.more.weight"] = torch.zeros(2)
        tensors[UP] = tensors[UP][:40].clone()

    with pytest.raises(ConfigError, match=r"1 missing: .*1 extra: .*1 of another shape: "):
        changed(break_all)


def test_allowed_ones_are_left_to_be_drawn(changed):
    def drop(tensors):
        for name in [name for name in tensors if name.startswith(PROJECTOR)]:
            del tensors[name]

    found = changed(drop, allow_missing=(f"{PROJECTOR}.*",))
    assert sorted(found.missing) == [
        f"{PROJECTOR}.linear_{number}.{part}" for number in (1, 2) for part in ("bias", "weight")
    ]
    with pytest.raises(ConfigError, match="2 missing: "):
        changed(drop, allow_missing=(f"{PROJECTOR}.*.bias",))


@pytest.mark.parametrize("setting", ["allow_missing", "allow_extra"])
def test_a_pattern_that_matches_nothing_is_refused(changed, setting):
    with pytest.raises(ConfigError, match=rf"{setting} names 'model\.none\.\*'"):
        changed(**{setting: ("model.none.*",)})


def test_old_buffers_are_no_extra_weights(changed):
    def add(tensors):
        tensors["model.language_model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)

    assert changed(add).direct[UP] == UP


def test_integers_are_no_weights(changed):
    def quantise(tensors):
        tensors[UP] = tensors[UP].to(torch.int8)

    with pytest.raises(ConfigError, match=rf"1 of the weights .*{UP}"):
        changed(quantise)


def test_a_weight_under_two_names_is_refused(changed):
    def twice(tensors):
        tensors[UP.replace("model.language_model.", "language_model.model.")] = tensors[UP].clone()

    with pytest.raises(ConfigError, match="twice"):
        changed(twice)


def test_one_tensor_in_two_files_is_refused(saved, tmp_path):
    tensors = load_file(saved / "model.safetensors")
    for name in ("one.safetensors", "two.safetensors"):
        save_file(tensors, tmp_path / name)
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"is in two\.safetensors and in another file"):
        TensorFiles(tmp_path)


def test_a_damaged_file_is_refused(saved, tmp_path):
    content = (saved / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(content[:-100])
    with pytest.raises(ConfigError, match="no safetensors file that can be read"):
        TensorFiles(tmp_path)
