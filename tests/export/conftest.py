import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from diptych.core.records import Layout, Run, RunSpec
from diptych.core.release import CHECKSUMS, release_checksums
from tests.conftest import TINY_MODEL, TINY_SCHEDULE
from tests.runs import finish_run, make_spec


@dataclass(frozen=True)
class Trained:
    """A finished run's folder and record, and the weights that its checkpoint must hold."""

    run: Run
    spec: RunSpec
    weights: dict[str, Any]


@pytest.fixture(scope="session")
def trained(corpus, tmp_path_factory):
    """Weights that were never trained, but are as large as trained ones."""
    import torch

    from diptych.data.processor import read_processor_info
    from diptych.model.assemble import build

    spec = make_spec(corpus, layout=Layout(), model=TINY_MODEL, schedule=TINY_SCHEDULE)
    info = read_processor_info(corpus.processor)
    model = build(TINY_MODEL, tokens=info.tokens, image=info.image, seed=0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    run = finish_run(spec, runs=tmp_path_factory.mktemp("runs"), weights=weights)
    return Trained(run=run, spec=spec, weights=weights)


@pytest.fixture(scope="session")
def written(trained, corpus, tmp_path_factory):
    """A release as `write` leaves it; take a copy before changing anything."""
    from diptych.export.write import ExportParams, write

    folder = tmp_path_factory.mktemp("a project") / "release"
    return write(trained.run, corpus.processor, corpus.manifest, ExportParams(), str(folder))


@pytest.fixture
def release(written, tmp_path):
    """A copy of the release that a test may change."""
    return Path(shutil.copytree(written, tmp_path / "release"))


def seal(release):
    """Make the checksums those of the files that lie there now, as a careful forger would."""
    (release / CHECKSUMS).write_text(json.dumps(release_checksums(release)))
