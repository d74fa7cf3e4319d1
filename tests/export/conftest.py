import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from diptych.core.records import Layout, Run, RunSpec
from diptych.core.release import CHECKSUMS, release_checksums
from tests.conftest import TINY_MODEL, TINY_SCHEDULE
from tests.runs import make_spec


@dataclass(frozen=True)
class Trained:
    """A finished run's folder and record, and the weights that its checkpoint must hold."""

    run: Run
    spec: RunSpec
    weights: dict[str, Any]


def save_checkpoint(folder, tensors, *, means=None):
    import torch

    from diptych.parallel.mesh import World
    from diptych.parallel.storage import MODEL_PREFIX, OPTIMIZER_PREFIX, save

    world = World(rank=0, size=1, device=torch.device("cpu"))
    named = {MODEL_PREFIX + name: tensor for name, tensor in tensors.items()}
    named |= {f"{OPTIMIZER_PREFIX}{name}.ema": tensor for name, tensor in (means or {}).items()}
    save(folder, tensors=named, state={"step": 6}, world=world)


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
    folder = tmp_path_factory.mktemp("runs") / spec.run_id
    folder.mkdir()
    (folder / "run_spec.json").write_text(spec.model_dump_json())
    checkpoint = folder / "checkpoints" / "step-00000006"
    save_checkpoint(checkpoint, weights)
    run = Run(
        run_id=spec.run_id,
        identity_sha256=spec.identity.sha256,
        folder=str(folder),
        checkpoint=str(checkpoint),
        num_steps=6,
        final_loss=2.345678,
        final_heldout_loss=2.5,
        train_s=75.0,
        num_attempts=1,
        world_size=1,
        num_masked=3,
        num_skipped=1,
        source_sha256="test",
    )
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
