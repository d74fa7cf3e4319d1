"""Weights & Biases: metrics in, its run out, under the run's own id; offline, in its folder.

Offline, nothing is sent: `wandb sync <run>/wandb/offline-run-*` does so later, one folder per
attempt, into one run. A step is logged once, whichever attempt it was done in.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from diptych.core.addresses import without_secrets
from diptych.core.records import Alert, RunSpec, WandbSpec
from diptych.monitor.sinks.queued import Metrics

_BLOCK_BYTES = 32 * 1024
_HEADER_BYTES = 7
_TAIL_BLOCKS = 8
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
_INIT_S = 60.0
_FINISH_S = 8.0
_SECRET_WORDS = ("token", "secret", "password", "passwd", "api_key", "apikey", "credential")
_NO_SECRETS = ("tokens", "token_weight", "token_multiple")
_ENVIRONMENT = ("env_vars", "env", "environment")


class Wandb:
    """A run of Weights & Biases for one attempt of ours.

    Args:
        folder: the run's folder; wandb's own is in it.
        spec: of the run; what of it may be seen is the config.
        lineage: which data, code and model it is, beside the spec.
    """

    name = "wandb"

    def __init__(self, folder: Path, *, spec: RunSpec, lineage: Mapping[str, Any]) -> None:
        self._folder = folder
        self._spec = spec
        self._lineage = dict(lineage)
        self._run: Any = None
        self._next_step = 0

    def open(self) -> None:
        """Begin the run, or go on with it; takes one or two seconds.

        Raises:
            ImportError: wandb is not installed.
        """
        self._run = _begin(
            self._folder,
            spec=self._spec,
            config={**public_config(self._spec), "lineage": self._lineage},
        )
        if self._spec.placement.observe.wandb.mode == "online":
            self._next_step = int(self._run.step) if self._run.resumed else 0
        else:
            self._next_step = last_logged_step(self._folder, run_id=self._spec.run_id) + 1

    def write(self, metrics: Metrics) -> None:
        """Log a step, unless an earlier attempt has."""
        if metrics.step >= self._next_step:
            self._next_step = metrics.step + 1
            self._run.log(dict(metrics.values), step=metrics.step, commit=True)

    def alert(self, alert: Alert) -> None:
        """Give an alert, where alerts go to wandb; its end is not given."""
        if self._spec.placement.observe.alerts.wandb and not alert.over:
            self._run.alert(title=f"{self._spec.run_id}: {alert.kind}", text=alert.text)

    def close(self) -> None:
        """Write out the run."""
        self._run.finish()


def lineage_of(spec: RunSpec) -> dict[str, Any]:
    """Say which data, processor, model and code a run is of."""
    identity = spec.identity
    return {
        "run_id": spec.run_id,
        "identity_sha256": identity.sha256,
        "manifest_sha256": identity.manifest_sha256,
        "processor_sha256": identity.processor_sha256,
        "git_commit": spec.provenance.git_commit,
        "git_dirty": spec.provenance.git_dirty,
        "source_sha256": spec.provenance.source_sha256,
    }


def public_config(spec: RunSpec) -> dict[str, Any]:
    """Return what of a spec may be seen by others: without what looks like a secret."""
    return {
        "identity": _public(spec.identity.model_dump(mode="json")),
        "placement": _public(spec.placement.model_dump(mode="json")),
    }


def artifact_name(spec: RunSpec) -> str:
    """Return the name of the artifact that a run's releases are versions of."""
    return f"release-{spec.run_id}"


def send_release(folder: Path, *, spec: RunSpec, release: Path, facts: Mapping[str, Any]) -> None:
    """Log a release as an artifact of its run, once the release is written.

    Whoever calls it sets a limit to its time. wandb copies the files first, for the score section
    of the release's card is written later; the copies are in the run's folder, unless the
    environment's WANDB_DATA_DIR names another.

    Args:
        folder: the run's folder.
        spec: of the run.
        release: the folder of the release.
        facts: its hash and the like, kept with the artifact.
    """
    os.environ.setdefault("WANDB_DATA_DIR", str((folder / "wandb").resolve()))
    import wandb

    run = _begin(folder, spec=spec, config=None, finish_s=0.0)
    try:
        artifact = wandb.Artifact(
            artifact_name(spec), type="model", metadata={**lineage_of(spec), **facts}
        )
        artifact.add_dir(str(release), policy="mutable", skip_cache=True)
        run.log_artifact(artifact)
    finally:
        run.finish()


def last_logged_step(folder: Path, *, run_id: str) -> int:
    """Return the last step that this run's offline files end with, -1 where they hold none."""
    # Two attempts within a second have names that differ in a number at the end.
    logs = folder.glob(f"wandb/offline-run-*-{run_id}*/run-{run_id}.wandb")
    steps = (_history_step(data) for log in logs for data in _tail_records(log))
    return max((step for step in steps if step is not None), default=-1)


def _begin(
    folder: Path,
    *,
    spec: RunSpec,
    config: Mapping[str, Any] | None,
    finish_s: float = _FINISH_S,
) -> Any:
    # Errors of its own are not reported to its maker either.
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    import wandb

    settings: WandbSpec = spec.placement.observe.wandb
    return wandb.init(
        id=spec.run_id,
        name=spec.run_id,
        resume="allow",
        project=settings.project,
        entity=settings.entity,
        tags=list(settings.tags),
        config=None if config is None else dict(config),
        dir=str(folder),
        mode=settings.mode,
        settings=wandb.Settings(
            console="off",
            silent=True,
            quiet=True,
            disable_git=True,
            save_code=False,
            symlink=False,
            init_timeout=_INIT_S,
            finish_timeout=finish_s,
            x_disable_stats=True,
            x_disable_meta=True,
            x_disable_machine_info=True,
            x_save_requirements=False,
            host="",
        ),
    )


def _public(value: Any, *, key: str = "") -> Any:
    """Leave out values under keys that name secrets, environments, and who asks in addresses."""
    if key in _ENVIRONMENT or _names_a_secret(key):
        return "(left out)" if value else value
    if isinstance(value, dict):
        return {name: _public(each, key=str(name).lower()) for name, each in value.items()}
    if isinstance(value, list):
        return [_public(each) for each in value]
    return without_secrets(value) if isinstance(value, str) else value


def _names_a_secret(key: str) -> bool:
    counts = any(word in key for word in _NO_SECRETS)
    return any(word in key for word in _SECRET_WORDS) and not counts


def _tail_records(path: Path) -> Iterator[bytes]:
    """Read the whole records near the end of a log in LevelDB's form.

    Source: LevelDB's log_format.md: blocks of 32 KiB, in them pieces of a checksum (4 bytes), a
    length (2), a type (1) and data. Differs: wandb's own header of 7 bytes is a part of the first
    block.
    """
    size = path.stat().st_size
    begin = max(0, size // _BLOCK_BYTES - _TAIL_BLOCKS) * _BLOCK_BYTES
    with path.open("rb") as file:
        file.seek(begin)
        data = file.read()
    place = 0 if begin else _HEADER_BYTES
    record: bytes | None = None
    while place + _HEADER_BYTES <= len(data):
        left = _BLOCK_BYTES - place % _BLOCK_BYTES
        if left < _HEADER_BYTES:
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        piece = data[place + _HEADER_BYTES : place + _HEADER_BYTES + length]
        if kind not in (_FULL, _FIRST, _MIDDLE, _LAST) or len(piece) < length:
            return  # the file was cut off here
        place += _HEADER_BYTES + length
        if kind in (_FULL, _FIRST):
            record = piece
        elif record is not None:
            record += piece
        if kind in (_FULL, _LAST) and record is not None:
            yield record
            record = None


def _history_step(data: bytes) -> int | None:
    """Return the step of a record of history; None for any other record."""
    from wandb.proto import wandb_internal_pb2

    messages: Any = wandb_internal_pb2
    record = messages.Record()
    try:
        record.ParseFromString(data)
    except Exception:  # protobuf's own class of error; the record is damaged
        return None
    return int(record.history.step.num) if record.HasField("history") else None
