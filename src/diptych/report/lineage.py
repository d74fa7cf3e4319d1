"""In: what every part of the workflow left behind. Out: one chain from raw bytes to scores.

Each artefact names the one it was made from; `trace` compares both ends of every such link, so that
a report drawn from artefacts of two different runs says so.
"""

from __future__ import annotations

from pathlib import Path

from diptych.core.records import (
    Lineage,
    Link,
    Manifest,
    ModelShape,
    Parity,
    RawSamples,
    Run,
    RunSpec,
    Scores,
)
from diptych.monitor.run_folder import RunFolder

SOURCE_LINK = "trained by the source code that composed the run_spec"


def trace(
    raw_samples: RawSamples,
    manifest: Manifest,
    model_shape: ModelShape,
    run_spec: RunSpec,
    run: Run,
    parity: Parity,
    scores: Scores,
) -> Lineage:
    """Put the chain into one record and compare every link.

    Args:
        raw_samples: the annotation files and their digests.
        manifest: the shards; its hash is the data's identity.
        model_shape: only its number of parameters is kept.
        run_spec: identity, placement and provenance of the run.
        run: what training left behind.
        parity: names the release and the run it was compared with.
        scores: names the release and the data it was scored on.
    """
    identity = run_spec.identity
    links = (
        Link(
            name="trained on this data",
            expected=manifest.sha256,
            found=identity.manifest_sha256,
        ),
        Link(
            name="trained as this run_spec says",
            expected=identity.sha256,
            found=run.identity_sha256,
        ),
        Link(
            name=SOURCE_LINK,
            expected=run_spec.provenance.source_sha256,
            found=run.source_sha256,
        ),
        Link(name="released from this run", expected=run.run_id, found=parity.run_id),
        Link(
            name="scored the release that was verified",
            expected=parity.release_sha256,
            found=scores.release_sha256,
        ),
        Link(
            name="scored on this data",
            expected=manifest.sha256,
            found=scores.manifest_sha256,
        ),
    )
    return Lineage(
        raw_samples=raw_samples,
        manifest_sha256=manifest.sha256,
        num_parameters=model_shape.num_parameters,
        run_spec=_as_run(run_spec, run=run),
        run=run,
        parity=parity,
        links=links,
    )


def _as_run(run_spec: RunSpec, *, run: Run) -> RunSpec:
    """Take the placement from the run's folder: a finished run is not trained again elsewhere."""
    folder = RunFolder(Path(run.folder))
    if not (folder.path / "run_spec.json").is_file():
        return run_spec
    return run_spec.model_copy(update={"placement": folder.read_spec().placement})
