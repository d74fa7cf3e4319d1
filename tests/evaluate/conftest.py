import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from diptych.core.records import Parity
from diptych.core.release import NOT_SCORED, SCORES_BEGIN, SCORES_END, release_sha256
from tests.conftest import TINY_MODEL


@dataclass(frozen=True)
class Release:
    """A release made with transformers alone, of a model that answers unlike things unlike."""

    folder: Path
    parity: Parity


@pytest.fixture(scope="session")
def release(corpus, tmp_path_factory):
    import torch
    from transformers import GenerationConfig

    from diptych.data.processor import read_processor_info
    from diptych.model.assemble import build

    info = read_processor_info(corpus.processor)
    model = build(TINY_MODEL, tokens=info.tokens, image=info.image, seed=0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(6)  # fresh weights are too small to tell two prompts apart
    model.generation_config = GenerationConfig(
        do_sample=False, eos_token_id=info.tokens.eos, pad_token_id=info.tokens.pad
    )
    folder = tmp_path_factory.mktemp("a release") / "release"
    model.save_pretrained(folder)
    shutil.copytree(corpus.processor, folder, dirs_exist_ok=True)
    card = f"# Card\n\n{SCORES_BEGIN}\n\n{NOT_SCORED}\n\n{SCORES_END}\n\n## Data\n"
    (folder / "README.md").write_text(card)
    parity = Parity(
        release_sha256=release_sha256(folder),
        run_id="0" * 12,
        max_abs=3e-6,
        max_rel=1e-7,
        tolerance=1e-5,
        num_samples=16,
        num_logits=1,
        missing_keys=(),
        extra_keys=(),
        tokens_equal=True,
        passed=True,
    )
    return Release(folder=folder, parity=parity)


@pytest.fixture(scope="session")
def reader(corpus):
    from diptych.data.shards.reader import ShardReader

    return ShardReader(corpus.shards, manifest=corpus.manifest, split="heldout")
