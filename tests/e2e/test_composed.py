"""A composition of two pretrained towers, from their folders to a proven release."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys

import pytest
import torch
import yaml
from safetensors.torch import load_file

from diptych.model.revision import digest
from tests.e2e.conftest import ROOT

pytestmark = pytest.mark.slow

VISION, LANGUAGE = "google/siglip-base-patch16-224", "Qwen/Qwen3-0.6B"
"""As the documented recipe names them."""


def _recipe():
    text = (ROOT / "docs" / "weights.md").read_text()
    section = text.partition("## Towers that were trained apart")[2].partition("\n## ")[0]
    (settings,) = re.findall(r"```yaml\n(.*?)```", section, flags=re.DOTALL)
    (code,) = re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL)
    return yaml.safe_load(settings), code


def _save_towers(project):
    """Save what stands for the hub's: a SigLIP and a Qwen3, with the tokenizer of `prepare`."""
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    image = {"image_size": 64, "patch_size": 16, "num_attention_heads": 2, **sizes}
    text = {"vocab_size": 64, "num_attention_heads": 2, **sizes}
    vision, language = project.path / "siglip", project.path / "qwen3"
    transformers.SiglipModel(
        transformers.SiglipConfig(vision_config=image, text_config=text)
    ).save_pretrained(vision)
    transformers.SiglipImageProcessor(size={"height": 64, "width": 64}).save_pretrained(vision)
    (processor,) = project.path.glob("data/*/processor")
    tokenizer = transformers.AutoTokenizer.from_pretrained(processor)
    transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(
            **{**text, "vocab_size": len(tokenizer) + 32},
            num_key_value_heads=1,
            head_dim=16,
            initializer_range=0.2,
            tie_word_embeddings=True,
        )
    ).save_pretrained(language)
    tokenizer.save_pretrained(language)
    return vision, language


def test_the_documented_recipe_makes_a_proven_release(planned, tmp_path):
    project = planned.copy(tmp_path / "a project")
    vision, language = _save_towers(project)
    settings, code = _recipe()
    settings["plan"]["model"]["towers"] = {
        "vision": {"weights": "siglip"},
        "language": {"weights": "qwen3"},
    }
    conf = project.path / "conf/tiny"
    plan = yaml.safe_load((conf / "parameters_plan.yml").read_text())
    plan["plan"]["model"] = settings["plan"]["model"]
    (conf / "parameters_plan.yml").write_text(yaml.safe_dump(plan))
    prepare = yaml.safe_load((conf / "parameters_prepare.yml").read_text())
    prepare["prepare"]["processor"] = {"mode": "load", "source": "data/processor"}
    (conf / "parameters_prepare.yml").write_text(yaml.safe_dump(prepare))
    train = yaml.safe_load((conf / "parameters_train.yml").read_text())
    train["train"] |= {"num_steps": 6, "optimizer": {"warmup_steps": 2, "lr": 1.0e-2}}
    (conf / "parameters_train.yml").write_text(yaml.safe_dump(train))
    code = code.replace(VISION, "siglip").replace(LANGUAGE, "qwen3")
    subprocess.run([sys.executable, "-c", code], cwd=project.path, env=project.env, check=True)

    done = project.run("--pipelines=export")
    assert done.returncode == 0, done.stdout + done.stderr
    release = project.path / "data/06_models/release"
    parity = json.loads((project.path / "data/07_model_output/parity.json").read_text())
    assert parity["passed"]
    (spec,) = project.path.glob("data/06_models/runs/*/run_spec.json")
    towers = json.loads(spec.read_text())["identity"]["model"]["towers"]
    assert towers["vision"]["weights_sha256"] == digest(vision)
    assert towers["language"]["weights_sha256"] == digest(language)
    card = (release / "README.md").read_text()
    assert "base_model: [siglip, qwen3]" in card
    assert f"siglip, digest `{digest(vision)}`; qwen3, digest `{digest(language)}`" in card

    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(release, dtype=torch.float32)
    stored = load_file(vision / "model.safetensors")
    for name, weight in model.model.vision_tower.named_parameters():
        assert torch.equal(weight, stored[f"vision_model.{name}"]), name
    stored = load_file(language / "model.safetensors")
    for name, weight in model.model.language_model.named_parameters():
        assert torch.equal(weight, stored[f"model.{name}"]), name
    assert model.lm_head.weight is model.get_input_embeddings().weight
    steps = (spec.parent / "steps.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in steps]
    assert len(losses) == 6
    assert all(math.isfinite(loss) for loss in losses)
