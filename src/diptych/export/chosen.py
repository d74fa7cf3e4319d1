"""Which checkpoint of a run is released: the last, the best, or the one of a step.

In: a finished run and the setting. Out: the run as it was at that checkpoint.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from diptych.core.errors import ConfigError
from diptych.core.records import Run
from diptych.monitor.run_folder import RunFolder


def at_checkpoint(run: Run, *, chosen: Literal["last", "best"] | int) -> Run:
    """Return the run with the chosen checkpoint, and the step and losses that belong to it.

    Raises:
        ConfigError: there is no such checkpoint, or no score says which is best.
    """
    if chosen == "last":
        return run
    from diptych.parallel import storage

    folder = RunFolder(Path(run.folder))
    whole = {storage.step_of(path): path for path in storage.list_checkpoints(folder.checkpoints)}
    found = whole | storage.list_weights(folder.checkpoints)
    if chosen == "best":
        chosen = _best(run, folder=folder, whole=whole)
    if chosen not in found:
        raise ConfigError(
            f"export.checkpoint is {chosen}, and run {run.run_id} has no checkpoint of that step",
            allowed=f"last, best, or one of the steps {', '.join(map(str, sorted(found)))}",
            cure="Name one of these; train.keep_every_steps and weights_every_steps keep more",
        )
    scores = storage.read_state(found[chosen])["scores"]
    return run.model_copy(
        update={
            "checkpoint": found[chosen].as_posix(),
            "num_steps": chosen,
            "final_loss": scores.get("loss"),
            "final_heldout_loss": scores.get("heldout_loss"),
        }
    )


def _best(run: Run, *, folder: RunFolder, whole: dict[int, Path]) -> int:
    from diptych.parallel import storage

    name = folder.read_spec().placement.keep_best
    scores = {step: storage.read_state(path)["scores"] for step, path in whole.items()}
    scored = {
        step: each[name] for step, each in scores.items() if name is not None and name in each
    }
    if not scored:
        raise ConfigError(
            f"export.checkpoint is best, and no checkpoint of run {run.run_id} has a score"
            + (f" named {name}" if name else ""),
            allowed="A run that was trained with train.keep_best, such as heldout_loss",
            cure="Set export.checkpoint: last, or train with train.keep_best",
        )
    return min(scored, key=lambda step: (scored[step], step))
