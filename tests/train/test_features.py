"""A frozen vision tower: its features are computed once and train the same run as images do."""

from __future__ import annotations

import pytest

from diptych.core.records import Layout
from diptych.monitor.run_folder import RunFolder
from tests.conftest import TINY_MODEL, TINY_SCHEDULE
from tests.runs import make_spec, train_rank

LAYOUTS = {
    "ddp": Layout(engine="ddp", dp=2, micro_batch=4),
    "fsdp2": Layout(engine="fsdp2", shard=2, micro_batch=4),
}
FROZEN = TINY_MODEL.model_copy(update={"freeze": ("vision",)})


def _train(ranks, corpus, folder, *, layout, features=None):
    run = RunFolder(folder)
    run.path.mkdir()
    spec = make_spec(corpus, layout=layout, model=FROZEN, schedule=TINY_SCHEDULE, num_steps=4)
    placement = spec.placement.model_copy(
        update={"vision_features": str(features) if features else None}
    )
    run.write_spec(spec.model_copy(update={"placement": placement}))
    ranks(2).run(train_rank, folder=run.path)
    return run.read_steps()


def _times(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if len(path.name) == 32}


@pytest.mark.parametrize("name", LAYOUTS)
def test_features_train_the_same_run_as_images(name, ranks, corpus, tmp_path):
    layout, features = LAYOUTS[name], tmp_path / "features"
    expected = _train(ranks, corpus, tmp_path / "images", layout=layout)
    found = _train(ranks, corpus, tmp_path / "features-1", layout=layout, features=features)
    for one, other in zip(expected, found, strict=True):
        assert other.loss == pytest.approx(one.loss, rel=1e-5)
        assert other.grad_norm == pytest.approx(one.grad_norm, rel=1e-4)
        assert (other.num_image_tokens, other.num_patches) == (
            one.num_image_tokens,
            one.num_patches,
        )
    held = [step.heldout_loss for step in expected if step.heldout_loss is not None]
    again = [step.heldout_loss for step in found if step.heldout_loss is not None]
    assert again == pytest.approx(held, rel=1e-5)
    # Another run with the same tower computes nothing anew.
    before = _times(features)
    assert before
    _train(ranks, corpus, tmp_path / "features-2", layout=layout, features=features)
    assert _times(features) == before
