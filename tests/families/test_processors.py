"""A family's processor, loaded as a user brings it, and the ones that cannot be used."""

from __future__ import annotations

import json
import shutil

import pytest
import yaml

from diptych.core.errors import ConfigError
from diptych.data.processor import ProcessorParams, fit, read_processor_info


def _load(corpus, source, folder):
    params = ProcessorParams(mode="load", source=str(source))
    return fit(corpus.sample_index, params, str(folder))


def test_a_loaded_processor_is_described_as_the_fitted_one(prepared, tmp_path):
    loaded = _load(prepared.corpus, prepared.corpus.processor, tmp_path / "processor")
    ours, theirs = prepared.info, read_processor_info(loaded)
    assert theirs.model_copy(update={"sha256": ours.sha256}) == ours


def test_a_template_without_assistant_turns_is_refused(prepared, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(prepared.corpus.processor, source)
    template = "{% for message in messages %}{{ message['role'] }}{% endfor %}"
    (source / "chat_template.jinja").write_text(template)
    with pytest.raises(ConfigError, match="writes no turns of the assistant"):
        _load(prepared.corpus, source, tmp_path / "processor")


def test_a_tokenizer_without_the_image_token_is_refused(prepared, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(prepared.corpus.processor, source)
    name = prepared.processor.image_token
    for path in source.glob("tokenizer*.json"):
        path.write_text(path.read_text().replace(json.dumps(name)[1:-1], "<|other|>"))
    with pytest.raises(ConfigError, match="token"):
        _load(prepared.corpus, source, tmp_path / "processor")


def test_the_settings_of_a_case_are_plain_yaml(prepared):
    """What the tests build, a person can write into conf."""
    written = yaml.safe_dump(prepared.case.processor.model_dump(mode="json"))
    assert ProcessorParams(**yaml.safe_load(written)) == prepared.case.processor
