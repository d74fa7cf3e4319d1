"""A run that begins with a release: what of its own spec it keeps."""

from __future__ import annotations

import pytest

from diptych.core.errors import ConfigError
from diptych.core.records import ModelSpec, Parity, Towers, TowerWeights
from diptych.model.inherit import inherit


def parity_of(release_sha256: str) -> Parity:
    return Parity(
        release_sha256=release_sha256,
        run_id="r",
        max_abs=0.0,
        max_rel=0.0,
        tolerance=1e-5,
        num_samples=1,
        num_logits=1,
        missing_keys=(),
        extra_keys=(),
        tokens_equal=True,
        passed=True,
    )


def test_the_spec_names_the_release_and_keeps_what_trains(tmp_path):
    spec = ModelSpec(sizes={"text": {}}, tie_word_embeddings=False, freeze=("vision",))
    begun = inherit(spec, tmp_path / "release", parity_of("a" * 64))
    assert begun == ModelSpec(
        weights=f"{tmp_path.as_posix()}/release",
        tie_word_embeddings=False,
        freeze=("vision",),
    )
    # Weights that the first stage began with are not begun with again.
    first = ModelSpec(weights="elsewhere", freeze=("vision",))
    assert inherit(first, tmp_path / "release", parity_of("a" * 64)).weights == begun.weights
    towers = Towers(vision=TowerWeights(weights="elsewhere"))
    composed = ModelSpec(family="llava", towers=towers, tie_word_embeddings=False)
    then = inherit(composed, tmp_path / "release", parity_of("a" * 64))
    assert (then.family, then.weights, then.towers) == ("llava", begun.weights, None)


def test_adapters_beside_the_weights_are_not_left_behind(tmp_path):
    release = tmp_path / "release"
    (release / "adapter").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"begin without them.*export\.lora: merged"):
        inherit(ModelSpec(), release, parity_of("a" * 64))
