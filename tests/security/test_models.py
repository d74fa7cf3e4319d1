"""Configs, processors and chat templates that somebody else wrote to run code or to hang."""

from __future__ import annotations

import builtins
import json
import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import jinja2
import pytest
from transformers import AutoConfig, AutoImageProcessor, AutoProcessor, dynamic_module_utils

import diptych
from diptych.core.errors import ConfigError, FormatError
from diptych.data.chat import ChatTokenizer, to_chat
from diptych.data.images.patches import load_patcher
from diptych.data.processor import ProcessorParams, fit, read_processor_info
from diptych.model.config_file import read
from tests.data.test_processor import make_index
from tests.model.test_config_file import SMALL
from tests.security.canary import Canary

CHAT = to_chat(())


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what is fooled out of the cache of this machine; whoever is asked says yes."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(builtins, "input", lambda *_: "y")
    monkeypatch.syspath_prepend(tmp_path / "modules")


def write_model(folder: Path, canary: Canary, **fields: Any) -> Path:
    """Write a config beside code that sings when it is imported."""
    folder.mkdir(exist_ok=True)
    # A class of its own: transformers marks those that came with code of others.
    code = "from transformers import Qwen3VLConfig\nclass Evil(Qwen3VLConfig): pass\n"
    (folder / "evil.py").write_text(f"{canary.python}\n{code}")
    (folder / "config.json").write_text(json.dumps({**SMALL, **fields}))
    return folder / "config.json"


def auto_map(name: str) -> dict[str, Any]:
    return {"auto_map": {name: "evil.Evil"}}


@pytest.mark.parametrize(
    "fields",
    [
        auto_map("AutoConfig"),
        auto_map("AutoModelForImageTextToText"),
        {"text_config": {**SMALL["text_config"], **auto_map("AutoConfig")}},
        {**auto_map("AutoConfig"), "model_type": "never_heard_of"},
        {"trust_remote_code": True, **auto_map("AutoConfig")},
    ],
)
def test_a_config_that_brings_code(canary: Canary, tmp_path: Path, fields: dict[str, Any]) -> None:
    fooled = write_model(
        tmp_path / "fooled", canary, model_type="unknown", **auto_map("AutoConfig")
    )
    # Not told whether to trust, transformers asks at the terminal, where somebody says yes.
    canary.proves(lambda: AutoConfig.from_pretrained(fooled.parent), raises=Exception)
    with pytest.raises(ConfigError, match="code of others is never run"):
        read(write_model(tmp_path / "weights", canary, **fields))


@pytest.mark.parametrize(
    "fields",
    [
        {"trust_remote_code": True},
        {"text_config": {**SMALL["text_config"], "trust_remote_code": True}},
        {"attn_implementation": "someone/kernel"},
        {"_attn_implementation_internal": "someone/kernel:run"},
        {"_attn_implementation": {"text_config": "https://host.example/kernel"}},
        {"text_config": {**SMALL["text_config"], "_experts_implementation": "a/b@main"}},
    ],
)
def test_a_config_that_turns_a_switch(
    canary: Canary, tmp_path: Path, fields: dict[str, Any]
) -> None:
    """Of transformers before 5.5 such fields beat `trust_remote_code=False`."""
    path = write_model(tmp_path / "weights", canary)
    canary.shows(read(path).text_config.hidden_size == 32)
    with pytest.raises(ConfigError, match="code of others is never run"):
        read(write_model(tmp_path / "weights", canary, **fields))


@pytest.mark.parametrize("name", ["processor_config.json", "tokenizer_config.json"])
def test_a_processor_that_brings_code(
    canary: Canary, corpus: Any, tmp_path: Path, name: str
) -> None:
    folder = tmp_path / "theirs"
    shutil.copytree(corpus.processor, folder)
    (folder / "evil.py").write_text(f"{canary.python}\n")
    kinds = {"processor_config.json": "Processor", "tokenizer_config.json": "Tokenizer"}
    own = f"Auto{kinds[name]}"
    value = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
    for key in ("processor_class", "tokenizer_class"):
        value[key] = "Unheard"
    entry: Any = "evil.Evil" if own == "AutoProcessor" else ["evil.Evil", "evil.Evil"]
    (folder / name).write_text(json.dumps({**value, "auto_map": {own: entry}}))
    canary.proves(lambda: AutoProcessor.from_pretrained(folder), raises=Exception)
    params = ProcessorParams(mode="load", source=str(folder))
    with pytest.raises(ConfigError):
        fit(make_index(tmp_path), params, str(tmp_path / "processor"))


def test_an_image_processor_that_brings_code(canary: Canary, corpus: Any, tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    shutil.copytree(corpus.processor, folder)
    (folder / "evil.py").write_text(f"{canary.python}\n")
    for name in ("preprocessor_config.json", "processor_config.json"):
        (folder / name).write_text(
            json.dumps(
                {"image_processor_type": "Unheard", "auto_map": {"AutoImageProcessor": "evil.Evil"}}
            )
        )
    canary.proves(lambda: AutoImageProcessor.from_pretrained(folder), raises=Exception)
    image = read_processor_info(corpus.processor).image
    with pytest.raises(ValueError, match="trust_remote_code"):
        load_patcher(folder, image=image)


_LOADS = re.compile(r"(?:Auto\w+|Peft\w+)\.from_pretrained\((?:[^()]|\([^()]*\))*\)")


def test_no_loader_leaves_it_open_whether_code_is_run(canary: Canary) -> None:
    """Left open, transformers asks at the terminal, and takes a yes."""
    found = [
        call
        for path in Path(diptych.__file__).parent.rglob("*.py")
        for call in _LOADS.findall(path.read_text())
        if not call.startswith("Peft")
    ]
    canary.shows(len(found) >= 5)
    canary.shows(_LOADS.findall("x = AutoModel.from_pretrained(f(a), b=1)"))
    assert [call for call in found if "trust_remote_code=False" not in call] == []


def nested(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


@pytest.mark.parametrize("name", ["processor_config.json", "tokenizer_config.json"])
@pytest.mark.parametrize("text", [nested(100_000), "[" * 100_000, "\x00", "9" * 5000])
def test_a_processor_that_is_absurd(
    canary: Canary, corpus: Any, tmp_path: Path, name: str, text: str
) -> None:
    folder = tmp_path / "theirs"
    shutil.copytree(corpus.processor, folder)
    with pytest.raises((RecursionError, ValueError)) as caught:
        json.loads(text)
    canary.shows(caught.value)
    (folder / name).write_text(text)
    params = ProcessorParams(mode="load", source=str(folder))
    with pytest.raises(ConfigError):
        fit(make_index(tmp_path), params, str(tmp_path / "processor"))


def escapes(canary: Canary) -> dict[str, str]:
    path = str(canary.trace)
    return {
        "globals": f"{{{{ cycler.__init__.__globals__.os.mkdir('{path}') }}}}",
        "attr": "{{ (cycler|attr('__init__')|attr('__globals__'))['os'].mkdir('" + path + "') }}",
        "bases": "{% for c in ''.__class__.__base__.__subclasses__() %}{% if c.__name__ == "
        "'_wrap_close' %}{{ c.__init__.__globals__['mkdir']('" + path + "') }}{% endif %}"
        "{% endfor %}",
        "macro": "{% macro m() %}{% endmacro %}{{ m.__func__ and 1 }}"
        "{{ joiner.__init__.__globals__['__builtins__']['__import__']('os').mkdir('"
        f"{path}') }}}}",
        "namespace": f"{{{{ namespace.__init__.__globals__.os.mkdir('{path}') }}}}",
        "self": "{{ self.__init__.__globals__.__builtins__.__import__('os').mkdir('"
        f"{path}') }}}}",
    }


def render(folder: Path, template: str) -> str:
    (folder / "chat_template.jinja").write_text(template)
    return ChatTokenizer(folder).render(CHAT)


@pytest.mark.parametrize("name", ["globals", "attr", "bases", "macro", "namespace", "self"])
def test_a_chat_template_that_leaves_its_sandbox(
    canary: Canary, corpus: Any, tmp_path: Path, name: str
) -> None:
    template = escapes(canary)[name]
    canary.proves(lambda: jinja2.Template(template).render(), raises=jinja2.TemplateError)
    shutil.copytree(corpus.processor, tmp_path / "theirs")
    with suppress(FormatError):
        render(tmp_path / "theirs", template)


@pytest.mark.parametrize(
    "template",
    [
        "{{ '{0.__class__.__init__.__globals__}'.format(cycler) }}",
        "{{ messages.append(1) }}",
        "{{ 'a' * 10**9 }}",
        "{{ [0] * 10**9 }}",
        "{{ 9**(9**9) }}",
        "{% for n in range(10**9) %}a{% endfor %}",
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{% if 1 %}" * 5000 + "{% endif %}" * 5000,
        "{{ lipsum(n=100000) }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
    ],
)
def test_a_chat_template_that_asks_for_too_much(
    canary: Canary, corpus: Any, tmp_path: Path, template: str
) -> None:
    shutil.copytree(corpus.processor, tmp_path / "theirs")
    canary.shows(render(tmp_path / "theirs", "{{ 'a' * 3 }}{{ 2**8 }}") == "aaa256")
    with pytest.raises(FormatError):
        render(tmp_path / "theirs", template)
