"""A run with adapters: merged into the release, or beside it as peft reads it."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from diptych.core.errors import ParityError
from diptych.core.records import Layout, LoraSpec, Run, RunSpec
from diptych.data.processor import read_processor_info
from diptych.data.shards.reader import ShardReader
from diptych.evaluate import generate
from diptych.export import reload
from diptych.export.verify import verify
from diptych.export.write import ExportParams, write
from diptych.model.assemble import build
from diptych.shape.adapters import is_adapter
from tests.conftest import TINY_MODEL, TINY_SCHEDULE
from tests.export.conftest import seal
from tests.runs import finish_run, make_spec

# peft 0.21 asks transformers 5 for a name that it renamed.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")

LAYER = "model.language_model.layers.1.mlp.up_proj"
KINDS = {
    "lora": LoraSpec(rank=4, alpha=12.0),
    "dora": LoraSpec(rank=4, alpha=12.0, dora=True, towers=("vision", "language")),
}


@dataclass(frozen=True)
class Adapted:
    """A run of adapters as large as trained ones."""

    run: Run
    spec: RunSpec
    weights: dict[str, Any]


@pytest.fixture(scope="module", params=KINDS)
def adapted(request, corpus, tmp_path_factory):
    lora = KINDS[request.param]
    model_spec = TINY_MODEL.model_copy(update={"lora": lora})
    spec = make_spec(corpus, layout=Layout(), model=model_spec, schedule=TINY_SCHEDULE)
    info = read_processor_info(corpus.processor)
    model = build(model_spec, tokens=info.tokens, image=info.image, seed=0)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
            elif "lora_magnitude" in name:
                parameter.mul_(torch.rand_like(parameter) + 0.5)
            elif parameter.ndim > 1 and not is_adapter(name):
                parameter.mul_(4)
    weights = {name: each.detach().clone() for name, each in model.named_parameters()}
    means = {name: each / 2 for name, each in weights.items() if is_adapter(name)}
    run = finish_run(spec, runs=tmp_path_factory.mktemp("runs"), weights=weights, means=means)
    return Adapted(run=run, spec=spec, weights=weights)


@pytest.fixture
def here(monkeypatch):
    """Run the reloading in this process: quicker than a fresh one."""

    def run_here(commands, **_):
        for _module, *arguments in commands:
            reload.main(arguments)

    monkeypatch.setattr("diptych.export.verify.run_modules", run_here)


def _export(adapted, corpus, folder, **params):
    params = ExportParams(num_samples=4, **params)
    return write(adapted.run, corpus.processor, corpus.manifest, params, str(folder)), params


def _by_hand(weights, *, layer, lora):
    """W + alpha / rank * B A, and for DoRA each row of it stretched to its magnitude."""
    a = weights[f"{layer}.lora_A.default.weight"]
    b = weights[f"{layer}.lora_B.default.weight"]
    total = weights[f"{layer}.base_layer.weight"] + lora.alpha / lora.rank * (b @ a)
    if lora.dora:
        magnitude = weights[f"{layer}.lora_magnitude_vector.default.weight"]
        total = total * (magnitude / total.pow(2).sum(dim=1).sqrt())[:, None]
    return total


def test_merged_weights_are_the_sum(adapted, corpus, tmp_path):
    release, _ = _export(adapted, corpus, tmp_path / "release")
    found = load_file(release / "model.safetensors")
    lora = adapted.spec.identity.model.lora
    expected = _by_hand(adapted.weights, layer=LAYER, lora=lora)
    torch.testing.assert_close(found[f"{LAYER}.weight"], expected, rtol=1e-6, atol=1e-6)
    assert not [name for name in found if "lora" in name or "base_layer" in name]
    assert not (release / "adapter").exists()
    norm = "model.language_model.norm.weight"
    assert torch.equal(found[norm], adapted.weights[norm])
    assert "lora" not in (release / "config.json").read_text()
    assert "merged into the weights" in (release / "README.md").read_text()


@pytest.mark.parametrize("form", ["merged", "apart"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_parity(adapted, corpus, tmp_path, here, form, dtype):
    release, params = _export(adapted, corpus, tmp_path / "release", lora=form, dtype=dtype)
    parity = verify(release, adapted.run, params)
    assert parity.passed
    assert parity.missing_keys == parity.extra_keys == ()


def test_the_mean_of_adapters_is_released(adapted, corpus, tmp_path, here):
    release, params = _export(adapted, corpus, tmp_path / "release", lora="apart", weights="ema")
    assert verify(release, adapted.run, params).passed
    found = load_file(release / "adapter" / "adapter_model.safetensors")
    expected = adapted.weights[f"{LAYER}.lora_B.default.weight"] / 2
    assert torch.equal(found[f"base_model.model.{LAYER}.lora_B.weight"], expected)


def test_apart_is_what_peft_itself_writes(adapted, corpus, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForImageTextToText

    release, _ = _export(adapted, corpus, tmp_path / "release", lora="apart")
    base = load_file(release / "model.safetensors")
    assert torch.equal(base[f"{LAYER}.weight"], adapted.weights[f"{LAYER}.base_layer.weight"])
    model = AutoModelForImageTextToText.from_pretrained(release)
    model = PeftModel.from_pretrained(model, release / "adapter")
    loaded = dict(model.base_model.model.named_parameters())
    for name, weight in adapted.weights.items():
        assert torch.equal(loaded[name], weight), name
    model.save_pretrained(tmp_path / "theirs")
    theirs = load_file(tmp_path / "theirs" / "adapter_model.safetensors")
    ours = load_file(release / "adapter" / "adapter_model.safetensors")
    assert theirs.keys() == ours.keys()
    config = json.loads((release / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (4, 12)
    assert config["target_modules"] == sorted(config["target_modules"])
    card = (release / "README.md").read_text()
    assert 'PeftModel.from_pretrained(model, f"{folder}/adapter")' in card


def test_another_adapter_is_caught(adapted, corpus, tmp_path, here):
    release, params = _export(adapted, corpus, tmp_path / "release", lora="apart")
    path = release / "adapter" / "adapter_model.safetensors"
    tensors = load_file(path)
    name = f"base_model.model.{LAYER}.lora_A.weight"
    save_file(tensors | {name: tensors[name] * 2}, path, metadata={"format": "pt"})
    seal(release)
    with pytest.raises(ParityError, match=r"up_proj\.lora_A"):
        verify(release, adapted.run, params)


def test_another_strength_is_caught(adapted, corpus, tmp_path, here):
    release, params = _export(adapted, corpus, tmp_path / "release", lora="apart")
    path = release / "adapter" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"lora_alpha": 24}))
    seal(release)
    with pytest.raises(ParityError, match="logits differ"):
        verify(release, adapted.run, params)


def test_both_forms_answer_alike(adapted, corpus, tmp_path):
    """In `evaluate`, whose process puts the adapter on the weights."""
    reader = ShardReader(corpus.shards, manifest=corpus.manifest, split="heldout")
    asked = [
        {
            "index": row,
            "row": row,
            "num_images": len(stored.images),
            "messages": [stored.sample.messages[0].model_dump(mode="json")],
        }
        for row in range(8)
        for stored in [reader.read(row)]
    ]
    found = {}
    for form in ("merged", "apart", "untrained"):
        release, _ = _export(
            adapted, corpus, tmp_path / form, lora=form.replace("untrained", "apart")
        )
        if form == "untrained":
            shutil.rmtree(release / "adapter")
        job = tmp_path / f"{form}-job"
        job.mkdir()
        (job / "manifest.json").write_text(corpus.manifest.model_dump_json())
        (job / "questions-0.json").write_text(json.dumps([asked]))
        options = {
            "--job": job,
            "--release": release,
            "--shards": corpus.shards,
            "--part": 0,
            "--device": "cpu",
            "--max-new-tokens": 6,
        }
        generate.main([str(each) for option in options.items() for each in option])
        found[form] = json.loads((job / "answers-0.json").read_text())["answers"]
    assert found["merged"] == found["apart"]
    assert found["untrained"] != found["apart"]
