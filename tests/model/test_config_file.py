import json

import pytest

from diptych.core.errors import ConfigError
from diptych.model.config_file import read

SMALL = {
    "model_type": "qwen3_vl",
    "text_config": {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 512},
    "vision_config": {"depth": 2, "hidden_size": 32},
}


def written(tmp_path, content):
    path = tmp_path / "config.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def changed(group, **values):
    return {**SMALL, group: {**SMALL[group], **values}}


def nested(depth):
    return '{"a":' * depth + "1" + "}" * depth


def test_a_config_is_read(tmp_path):
    config = read(written(tmp_path, SMALL))
    assert config.text_config.hidden_size == 32
    assert config.vision_config.depth == 2


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ("", "JSONDecodeError"),
        ("[1, 2]", "names no model_type"),
        ('{"model_type": 3}', "names no model_type"),
        ('{"model_type": "qwen3_vl", "a": ' + nested(40) + "}", "nested deeper than 12"),
        (nested(100_000), "RecursionError|nested deeper"),
        (json.dumps({**SMALL, "a": ["b"] * 300_000}), "more than 200000 values"),
        (" " * 5_000_000, "5000000 bytes"),
        (changed("text_config", num_hidden_layers=10**9), "num_hidden_layers is 1000000000"),
        (changed("vision_config", depth=10**6), "depth is 1000000"),
        (changed("text_config", hidden_size=10**15), "hidden_size is 1000000000000000"),
        (changed("text_config", vocab_size=-5), "vocab_size is -5"),
        (changed("text_config", vocab_size=float("nan")), "vocab_size is nan"),
        (changed("text_config", rms_norm_eps=float("nan")), "rms_norm_eps is nan"),
        (changed("text_config", hidden_size="many"), "expected int, got str"),
        (changed("text_config", hidden_size=[32]), "cannot be used"),
        ({**SMALL, "text_config": "small"}, "cannot be used"),
        ({"model_type": "never_heard_of"}, "cannot be used"),
    ],
)
def test_an_absurd_config_is_refused(tmp_path, content, found):
    with pytest.raises(ConfigError, match=found):
        read(written(tmp_path, content))


@pytest.mark.parametrize("group", [None, "text_config"])
def test_code_of_others_is_refused_wherever_it_is_named(tmp_path, group):
    names = {"auto_map": {"AutoModel": "modeling_evil.EvilModel"}}
    content = {**SMALL, **names} if group is None else changed(group, **names)
    (tmp_path / "modeling_evil.py").write_text("raise SystemExit('it ran')")
    with pytest.raises(ConfigError, match=r"auto_map.*code of others is never run"):
        read(written(tmp_path, content))


@pytest.mark.parametrize("name", ["attn_implementation", "_attn_implementation"])
@pytest.mark.parametrize("group", [None, "text_config"])
def test_a_kernel_of_the_hub_is_refused_wherever_it_is_named(tmp_path, name, group):
    names = {name: "somebody/attention"}
    content = {**SMALL, **names} if group is None else changed(group, **names)
    with pytest.raises(ConfigError, match=r"somebody/attention.*code of others is never run"):
        read(written(tmp_path, content))


def test_quantised_weights_are_refused(tmp_path):
    content = {**SMALL, "quantization_config": {"quant_method": "gptq", "bits": 4}}
    with pytest.raises(ConfigError, match="quantised"):
        read(written(tmp_path, content))
