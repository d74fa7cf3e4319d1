"""Which checkpoint is released: by step, by score, or the last."""

import shutil

import pytest
import torch

from diptych.core.errors import ConfigError
from diptych.export.chosen import at_checkpoint
from diptych.export.write import ExportParams
from diptych.parallel import storage
from diptych.parallel.mesh import World

WORLD = World(rank=0, size=1, device=torch.device("cpu"))


@pytest.fixture
def run(trained, tmp_path):
    """A run whose best checkpoint is not its last, with weights alone of a third step."""
    folder = tmp_path / "run"
    shutil.copytree(trained.run.folder, folder)
    placement = trained.spec.placement.model_copy(update={"keep_best": "heldout_loss"})
    spec = trained.spec.model_copy(update={"placement": placement})
    (folder / "run_spec.json").write_text(spec.model_dump_json())
    for name, scores in (
        ("step-00000002", {"loss": 3.0, "heldout_loss": 1.5}),
        ("step-00000004", {"loss": 1.0, "heldout_loss": 1.75}),
        ("weights-00000003", {}),
    ):
        storage.save(
            folder / "checkpoints" / name,
            tensors={"model.weight": torch.ones(2)},
            state={"scores": scores},
            world=WORLD,
        )
    return trained.run.model_copy(update={"folder": str(folder)})


def test_the_last_is_the_run_as_it_ended(run):
    assert at_checkpoint(run, chosen="last") == run


def test_the_best_is_the_one_of_the_lowest_score(run):
    best = at_checkpoint(run, chosen="best")
    assert best.checkpoint.endswith("checkpoints/step-00000002")
    assert (best.num_steps, best.final_loss, best.final_heldout_loss) == (2, 3.0, 1.5)


def test_a_step_is_found_among_whole_states_and_weights(run):
    assert at_checkpoint(run, chosen=4).checkpoint.endswith("step-00000004")
    found = at_checkpoint(run, chosen=3)
    assert found.checkpoint.endswith("weights-00000003")
    # Nobody measured its losses.
    assert (found.num_steps, found.final_loss, found.final_heldout_loss) == (3, None, None)


def test_a_step_that_was_not_kept_is_refused_with_those_that_were(run):
    with pytest.raises(ConfigError, match=r"one of the steps 2, 3, 4, 6"):
        at_checkpoint(run, chosen=5)


def test_without_scores_there_is_no_best(trained):
    with pytest.raises(ConfigError, match=r"has a score.*train\.keep_best"):
        at_checkpoint(trained.run, chosen="best")


def test_what_is_no_choice_is_refused():
    with pytest.raises(ValueError, match="checkpoint"):
        ExportParams.model_validate({"checkpoint": "newest"})
