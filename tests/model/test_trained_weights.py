"""A rank trains weights of a folder as it trains the same weights drawn."""

from __future__ import annotations

import numpy as np
import pytest

from diptych.core.errors import ConfigError
from diptych.core.records import Layout, ModelSpec
from diptych.data.processor import read_processor_info
from diptych.model.assemble import build
from diptych.model.revision import pin
from tests.conftest import TINY_MODEL, TINY_SCHEDULE
from tests.runs import make_spec, trajectory

LAYOUTS = {
    "ddp": Layout(dp=2, micro_batch=2),
    "fsdp2": Layout(engine="fsdp2", shard=2, micro_batch=2),
}


@pytest.fixture(scope="module")
def folder(corpus, tmp_path_factory):
    """The weights that seed 0 draws."""
    info = read_processor_info(corpus.processor)
    path = tmp_path_factory.mktemp("weights")
    model = build(TINY_MODEL, tokens=info.tokens, image=info.image, seed=0)
    model.save_pretrained(path)
    return path


@pytest.mark.parametrize("name", LAYOUTS)
def test_weights_of_a_folder_train_as_those_that_were_drawn(ranks, corpus, folder, name):
    found = {}
    for kind, model in (("drawn", TINY_MODEL), ("read", pin(ModelSpec(weights=str(folder))))):
        spec = make_spec(corpus, layout=LAYOUTS[name], model=model, schedule=TINY_SCHEDULE)
        found[kind] = ranks(2).run(trajectory, spec=spec, num_steps=2)[0]
    assert np.array_equal(found["read"]["losses"], found["drawn"]["losses"])
    assert np.array_equal(found["read"]["gradient"], found["drawn"]["gradient"])


def test_ranks_refuse_weights_that_changed_since_the_run_was_composed(ranks, corpus, folder):
    model = ModelSpec(weights=str(folder), weights_sha256="0" * 64)
    spec = make_spec(corpus, layout=LAYOUTS["fsdp2"], model=model, schedule=TINY_SCHEDULE)
    with pytest.raises(AssertionError, match="Restore those weights") as caught:
        ranks(2).run(trajectory, spec=spec, num_steps=1)
    assert ConfigError.__name__ in str(caught.value)
