"""A release holds every trained weight, and is there whole or not at all."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoProcessor, GenerationConfig

from diptych.core.errors import FormatError
from diptych.core.records import Manifest
from diptych.core.release import fill_score_section, release_sha256
from diptych.data.processor import read_processor_info
from diptych.export.write import ExportParams, check_names, write
from tests.runs import save_checkpoint


def load_weights(folder):
    weights = {}
    for path in sorted(folder.glob("*.safetensors")):
        weights |= load_file(path)
    return weights


def test_every_trained_weight_is_in_the_release_bit_for_bit(written, trained):
    weights = load_weights(written)
    assert weights.keys() == trained.weights.keys()
    assert "lm_head.weight" not in weights  # tied: stored once, under the embedding's name
    assert all(torch.equal(weights[name], tensor) for name, tensor in trained.weights.items())
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}


def test_the_release_is_a_hugging_face_folder(written, corpus):
    names = {path.name for path in written.iterdir()}
    assert names >= {
        "model.safetensors",
        "config.json",
        "generation_config.json",
        "processor_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "README.md",
        "checksums.json",
    }
    assert "processor.json" not in names
    tokens = read_processor_info(corpus.processor).tokens
    generation = GenerationConfig.from_pretrained(written)
    assert (generation.eos_token_id, generation.pad_token_id) == (tokens.eos, tokens.pad)
    assert not generation.do_sample
    config = AutoConfig.from_pretrained(written)
    assert config.model_type == "qwen3_vl"
    assert config.tie_word_embeddings
    processor = AutoProcessor.from_pretrained(written)
    theirs = AutoProcessor.from_pretrained(corpus.processor)
    assert processor.chat_template == theirs.chat_template
    assert processor.tokenizer.get_vocab() == theirs.tokenizer.get_vocab()
    for path in written.glob("*.json"):
        assert str(written.parent.parent) not in path.read_text()


def test_checksums_are_those_of_the_files(written):
    checksums = json.loads((written / "checksums.json").read_text())
    hashed = {path.name for path in written.iterdir()} - {"README.md", "checksums.json"}
    assert checksums.keys() == hashed
    from hashlib import sha256

    for name, checksum in checksums.items():
        assert sha256((written / name).read_bytes()).hexdigest() == checksum


def test_large_releases_are_cut_into_files(trained, corpus, tmp_path):
    params = ExportParams(max_shard_bytes=60_000)
    folder = write(trained.run, corpus.processor, corpus.manifest, params, str(tmp_path / "r"))
    assert len(list(folder.glob("*.safetensors"))) > 1
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == trained.weights.keys()
    assert load_weights(folder).keys() == trained.weights.keys()


def test_bf16_rounds_every_weight_and_says_so(trained, corpus, tmp_path):
    params = ExportParams(dtype="bf16")
    folder = write(trained.run, corpus.processor, corpus.manifest, params, str(tmp_path / "r"))
    weights = load_weights(folder)
    for name, tensor in trained.weights.items():
        assert torch.equal(weights[name], tensor.to(torch.bfloat16))
    assert AutoConfig.from_pretrained(folder).dtype == torch.bfloat16
    assert "rounded to bfloat16" in (folder / "README.md").read_text()


def test_writing_twice_gives_the_same_release_and_keeps_its_scores(
    written, trained, corpus, tmp_path
):
    target = tmp_path / "release"
    arguments = (trained.run, corpus.processor, corpus.manifest)
    folder = write(*arguments, ExportParams(), str(target))
    assert release_sha256(folder) == release_sha256(written)
    fill_score_section(folder, text="| read | 0.98 |")
    write(*arguments, ExportParams(), str(target))
    assert "| read | 0.98 |" in (folder / "README.md").read_text()
    # Another release never inherits them.
    write(*arguments, ExportParams(dtype="bf16"), str(target))
    assert "Not scored yet." in (folder / "README.md").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["release"]


def test_an_older_release_is_replaced_without_writing_through_its_links(trained, corpus, tmp_path):
    cached = tmp_path / "cache"
    cached.write_bytes(b"an older model")
    cached.chmod(0o444)
    old = tmp_path / "release"
    old.mkdir()
    (old / "model.safetensors").hardlink_to(cached)
    (old / "stale.json").write_text("{}")
    write(trained.run, corpus.processor, corpus.manifest, ExportParams(), str(old))
    assert cached.read_bytes() == b"an older model"
    assert not (old / "stale.json").exists()
    assert load_weights(old).keys() == trained.weights.keys()


def replace_checkpoint(trained, folder, weights):
    save_checkpoint(folder / "step-00000006", weights)
    return trained.run.model_copy(update={"checkpoint": str(folder / "step-00000006")})


def test_a_checkpoint_with_other_weights_is_refused_and_the_old_release_stays(
    trained, corpus, tmp_path
):
    weights = dict(trained.weights)
    norm = weights.pop("model.language_model.norm.weight")
    weights["model.language_model.narm.weight"] = norm
    run = replace_checkpoint(trained, tmp_path, weights)
    old = tmp_path / "release"
    old.mkdir()
    (old / "config.json").write_text("{}")
    with pytest.raises(FormatError) as caught:
        write(run, corpus.processor, corpus.manifest, ExportParams(), str(old))
    assert "model.language_model.norm.weight is missing" in str(caught.value)
    assert "model.language_model.narm.weight is extra" in str(caught.value)
    assert [path.name for path in old.iterdir()] == ["config.json"]
    assert not list(tmp_path.glob(".release*"))


def test_writing_is_quiet(trained, corpus, tmp_path, capfd):
    write(trained.run, corpus.processor, corpus.manifest, ExportParams(), str(tmp_path / "r"))
    assert capfd.readouterr() == ("", "")


def test_export_starts_without_torch():
    code = (
        "import sys, diptych.export.write, diptych.export.verify;"
        "sys.exit(' '.join({'torch', 'transformers', 'kedro'} & set(sys.modules)) or 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_names_are_compared_both_ways():
    check_names(["a", "b"], wanted=["b", "a"])
    with pytest.raises(FormatError, match=r"a is missing; c is extra\."):
        check_names(["b", "c"], wanted=["a", "b"])


def test_the_data_and_the_processor_must_be_the_runs(trained, corpus, tmp_path):
    other = Manifest(shards=(), quarantined={})
    with pytest.raises(FormatError, match=f"The manifest is {other.sha256[:12]}"):
        write(trained.run, corpus.processor, other, ExportParams(), str(tmp_path / "r"))
    run = trained.run.model_copy(update={"identity_sha256": "f" * 64})
    with pytest.raises(FormatError, match="The run is ffffffffffff"):
        write(run, corpus.processor, corpus.manifest, ExportParams(), str(tmp_path / "r"))
    run = trained.run.model_copy(update={"folder": str(tmp_path / "nowhere")})
    with pytest.raises(FormatError, match=r"run_spec.*Train it again"):
        write(run, corpus.processor, corpus.manifest, ExportParams(), str(tmp_path / "r"))
    assert not (tmp_path / "r").exists()
