"""The small models that `docs/families.md` shows can be built beside the settings of the base."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from diptych.core.records import ModelSpec
from diptych.data.processor import ProcessorParams, fit, read_processor_info

ROOT = Path(__file__).resolve().parents[2]


def _snippets():
    text = (ROOT / "docs" / "families.md").read_text()
    for block in re.findall(r"```yaml\n(.*?)```", text, flags=re.DOTALL):
        recipe = yaml.safe_load(block)
        if recipe["plan"]["model"].get("sizes"):
            yield pytest.param(recipe, id=recipe["plan"]["model"]["family"])


def _over_the_base(recipe):
    from omegaconf import OmegaConf

    base = [
        OmegaConf.load(ROOT / f"conf/base/parameters_{name}.yml") for name in ("prepare", "plan")
    ]
    merged: Any = OmegaConf.to_container(OmegaConf.merge(*base, recipe), resolve=True)
    return merged


@pytest.mark.parametrize("recipe", list(_snippets()))
def test_a_recipe_makes_a_model_and_the_processor_that_belongs_to_it(recipe, corpus, tmp_path):
    from diptych.model.assemble import build

    merged = _over_the_base(recipe)
    processor = ProcessorParams(**merged["prepare"]["processor"])
    info = read_processor_info(fit(corpus.sample_index, processor, str(tmp_path / "processor")))
    spec = ModelSpec(**merged["plan"]["model"])
    model = build(spec, tokens=info.tokens, image=info.image, seed=None, device="meta")
    assert info.family == spec.family == model.config.model_type
