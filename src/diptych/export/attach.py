"""Attach a proven release to its run's tracker: a release and its parity in, what came of it out.

Nothing here fails an export, or holds it up for good: a release that could not be attached is
whole, and a warning says why it was not.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

from diptych.core.children import run_modules
from diptych.core.errors import DiptychError
from diptych.core.records import Attachment, Parity, Run, RunSpec
from diptych.export.write import read_run_spec
from diptych.monitor.sinks.wandb import artifact_name

_LOG = logging.getLogger(__name__)
_LEAST_S = 120.0
_BYTES_PER_S = 20e6
"""A sender that is slower is taken for one that hangs."""


def attach(release: Path, run: Run, parity: Parity) -> Attachment:
    """Attach a release to its run in Weights & Biases, where the run's settings ask for it.

    They do with wandb among `train.observe.sinks` and `train.observe.wandb.artifacts`.

    Args:
        release: the release's folder.
        run: the run that it was written from.
        parity: the proof of it, which is attached with it.
    """
    attachment = Attachment(release_sha256=parity.release_sha256, run_id=run.run_id)
    try:
        spec = read_run_spec(run)
        if not _is_wanted(spec):
            return attachment
        _send(release, run=run, parity=parity)
    except (DiptychError, OSError) as error:
        why = _last_line(error)
        _LOG.warning(
            "the release is whole, and it is not attached to run %s in wandb: %s. To try again, "
            "remove attachment.json beside its parity.json, and kedro run --pipelines=export",
            run.run_id,
            why,
        )
        return attachment.model_copy(update={"error": why})
    return attachment.model_copy(update={"artifact": artifact_name(spec)})


def _is_wanted(spec: RunSpec) -> bool:
    observe = spec.placement.observe
    return "wandb" in observe.sinks and observe.wandb.artifacts


def _send(release: Path, *, run: Run, parity: Parity) -> None:
    """Send the release by a process of its own.

    Raises:
        RunError: it failed, or took too long.
    """
    num_bytes = sum(path.stat().st_size for path in release.rglob("*") if path.is_file())
    facts = {"release_sha256": parity.release_sha256, "parity_max_abs": parity.max_abs}
    command = ["diptych.monitor.sinks.release", "--run", run.folder, "--release", str(release)]
    run_modules(
        [[*command, "--facts", json.dumps(facts)]],
        what="send the release to wandb",
        limit_s=_LEAST_S + num_bytes / _BYTES_PER_S,
    )


def _last_line(error: Exception) -> str:
    """Return what was found, or a process' last word, which says more."""
    said = error.cure or error.found if isinstance(error, DiptychError) else str(error)
    return said.strip().splitlines()[-1]
