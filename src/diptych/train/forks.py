"""Fork a run: begin a new one from a checkpoint of another, with other settings.

In: the draft of a run_spec and the name of a checkpoint. Out: the run_spec with its parent, or a
refusal. What ranks read of that checkpoint is `begin.py`'s business. Nothing is written to a
parent's folder.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from diptych.core.errors import ConfigError, FormatError
from diptych.core.hashing import sha256_file
from diptych.core.records import Identity, Keeps, Parent, RunSpec
from diptych.monitor.run_folder import RunFolder

_NAME = re.compile(r"(?P<run>[0-9a-f]{12}(\.old-\d+)?)(@(?P<step>\d+|newest))?")
_NEWEST = "newest"
_SUMS = "checksums.json"
_STATISTICS = (".running_mean", ".running_var")
_MOST = 5


def check_name(value: Any) -> Any:
    """Return `train.fork_from` as text, for the command line turns digits into a number.

    Raises:
        ValueError: it is no name of a run or of a checkpoint.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        value = f"{value:012d}"
    if value is None or (isinstance(value, str) and _NAME.fullmatch(value)):
        return value
    raise ValueError(
        f"{value!r} is no run: name a folder of folders.runs, which has twelve digits, and a step "
        "of it, such as 0123456789ab@100 or 0123456789ab@newest (a pipeline or a stage is no run; "
        "write @newest where the twelve digits alone would be read as a number)"
    )


def fork(run_draft: RunSpec, fork_from: str | None, fork_keeps: Keeps, runs: str) -> RunSpec:
    """Give a run its parent, if one is asked for.

    Args:
        run_draft: the spec as it is without a parent.
        fork_from: `<run>@<step>`, `<run>@newest` or `<run>`; None: the run begins anew.
        fork_keeps: everything, or weights and counters alone.
        runs: the folder that holds a folder per run.

    Raises:
        ConfigError: there is no such run or step, or what it holds does not fit the settings.
        FormatError: the checkpoint is damaged, or not that run's.
    """
    if fork_from is None:
        return run_draft
    found = _NAME.fullmatch(fork_from)
    assert found is not None, "the parameter was checked"
    root, name, step = Path(runs), found["run"], found["step"] or _NEWEST
    begun = _begun_from(run_draft, root=root, name=name, step=step, keeps=fork_keeps)
    if begun is not None:
        _check_features(begun, root=root)
        return begun
    checkpoint = _find(root, name=name, step=step)
    parent = Parent(
        run_id=name,
        step=int(checkpoint.name.removeprefix("step-")),
        sha256=sha256_file(checkpoint / _SUMS),
        keeps=fork_keeps,
    )
    spec = _with_parent(run_draft, parent=parent, checkpoint=checkpoint)
    _check_features(spec, root=root)
    if not _has_begun(spec, root=root):
        _check(spec, parent=parent, former=_read_spec(RunFolder(root / name)))
        _check_checkpoint(spec, parent=parent, checkpoint=checkpoint)
    return spec


def _with_parent(draft: RunSpec, *, parent: Parent, checkpoint: Path) -> RunSpec:
    return draft.model_copy(
        update={
            "identity": draft.identity.model_copy(update={"parent": parent}),
            "placement": draft.placement.model_copy(
                update={"parent_checkpoint": checkpoint.as_posix()}
            ),
        }
    )


def _has_begun(spec: RunSpec, *, root: Path) -> bool:
    """Whether a fork goes on from its own checkpoints, so that it needs the parent no more."""
    folder = RunFolder(root / spec.run_id)
    return folder.newest_checkpoint() > 0 or folder.finished.is_file()


def _begun_from(
    draft: RunSpec, *, root: Path, name: str, step: str, keeps: Keeps
) -> RunSpec | None:
    """Find this fork where it has begun, for its parent's checkpoint may be gone by now."""
    if step == _NEWEST:
        return None
    for parent in _known_parents(root):
        if (parent.run_id, parent.step, parent.keeps) == (name, int(step), keeps):
            spec = _with_parent(draft, parent=parent, checkpoint=_place(root / name, parent.step))
            if _has_begun(spec, root=root) and not _is_another(spec, parent=parent):
                return spec
    return None


def _is_another(spec: RunSpec, *, parent: Parent) -> bool:
    """Whether another checkpoint lies there by now."""
    sums = Path(spec.placement.parent_checkpoint or "") / _SUMS
    return sums.is_file() and sha256_file(sums) != parent.sha256


def _known_parents(root: Path) -> Iterator[Parent]:
    for path in sorted(root.glob("*/run_spec.json")):
        try:
            parent = RunFolder(path.parent).read_spec().identity.parent
        except ValidationError:
            continue
        if parent is not None:
            yield parent


def _place(run: Path, step: int) -> Path:
    return RunFolder(run).checkpoints / f"step-{step:08d}"


def _steps(run: Path) -> list[int]:
    """List the steps of complete checkpoints."""
    names = [path.parent.name for path in RunFolder(run).checkpoints.glob(f"step-*/{_SUMS}")]
    return sorted(int(name.removeprefix("step-")) for name in names)


def _find(root: Path, *, name: str, step: str) -> Path:
    """Return the folder of a complete checkpoint."""
    if not (root / name / "run_spec.json").is_file():
        raise ConfigError(
            f"train.fork_from names the run '{name}', and '{root}' has no such run",
            allowed=_list_runs(root),
            cure="Correct the run, or leave train.fork_from out",
        )
    steps = _steps(root / name)
    if steps and step == _NEWEST:
        return _place(root / name, steps[-1])
    if step != _NEWEST and int(step) in steps:
        return _place(root / name, int(step))
    said = f"Complete are the steps {', '.join(map(str, steps))}" if steps else "It has none"
    asked = "" if step == _NEWEST else f" of step {int(step)}"
    raise ConfigError(
        f"The run '{name}' has no complete checkpoint{asked}",
        allowed=said,
        cure="Name one that is there; train.keep_checkpoints says how many a run keeps",
    )


def _list_runs(root: Path) -> str:
    runs = sorted(root.glob("*/run_spec.json"), key=lambda path: -path.stat().st_mtime)
    said = []
    for path in runs[:_MOST]:
        steps = ", ".join(map(str, _steps(path.parent))) or "none"
        said.append(f"{path.parent.name} (steps {steps})")
    more = f" and {len(runs) - _MOST} more" if len(runs) > _MOST else ""
    return f"The newest there: {', '.join(said)}{more}" if said else "There is no run yet"


def _read_spec(folder: RunFolder) -> RunSpec:
    try:
        return folder.read_spec()
    except ValidationError as error:
        raise FormatError(
            f"The run_spec of the run '{folder.path.name}' cannot be read: {error.errors()[0]}",
            cure="Fork from a run of this release",
        ) from error


def _check(spec: RunSpec, *, parent: Parent, former: RunSpec) -> None:
    """Refuse what two specs alone tell."""
    identity, before = spec.identity, former.identity
    if parent.step >= identity.num_steps:
        raise ConfigError(
            f"The fork begins at step {parent.step}, and train.num_steps is {identity.num_steps}",
            allowed="num_steps counts from the parent's first step",
            cure=f"Set train.num_steps above {parent.step}, or fork from an earlier step",
        )
    if identity.processor_sha256 != before.processor_sha256:
        _check_vocabulary(spec, former=former)
    if parent.keeps == "all" and identity.optimizer.kind != before.optimizer.kind:
        raise ConfigError(
            f"train.optimizer.kind is {identity.optimizer.kind}, the parent's is "
            f"{before.optimizer.kind}: its moments mean nothing to another optimizer",
            cure="Set train.fork_keeps: weights, so that moments begin anew, or keep the kind",
        )


def _check_features(spec: RunSpec, *, root: Path) -> None:
    """Refuse features of a vision tower that the parent's checkpoint may have otherwise.

    Where a run is placed may change after it has begun, so this is asked every time.
    """
    parent = spec.identity.parent
    if spec.placement.vision_features is None or parent is None:
        return
    folder = RunFolder(root / parent.run_id)
    is_there = (folder.path / "run_spec.json").is_file()
    if is_there and _has_first_tower(spec.identity, _read_spec(folder).identity):
        return
    raise ConfigError(
        "train.vision_features keeps what the vision tower computes with the weights that a "
        "run is made with, and the parent's tower may have others",
        allowed="A parent that began with the same weights, froze the tower, and is no fork",
        cure="Set train.vision_features to null",
    )


def _has_first_tower(identity: Identity, before: Identity) -> bool:
    """Whether the vision tower in a checkpoint is the one that the fork is made with."""
    ours, theirs = identity.model, before.model
    return (
        "vision" in theirs.freeze
        and before.parent is None
        and identity.seed == before.seed
        and (ours.weights_sha256, ours.towers, ours.sizes)
        == (theirs.weights_sha256, theirs.towers, theirs.sizes)
    )


def _check_vocabulary(spec: RunSpec, *, former: RunSpec) -> None:
    if former.vocabulary_sha256 is not None and (
        former.vocabulary_sha256 == spec.vocabulary_sha256
    ):
        return
    why = (
        "the parent did not record which token has which id"
        if former.vocabulary_sha256 is None
        else "its tokens have other ids"
    )
    raise ConfigError(
        f"The processor is another than the parent's, and {why}: its embeddings would be read "
        "as other tokens'",
        allowed="A processor with the same tokens; image settings and chat template may differ",
        cure="Restore the settings of prepare.processor that the parent had",
    )


def _check_checkpoint(spec: RunSpec, *, parent: Parent, checkpoint: Path) -> None:
    """Refuse what the checkpoint's files tell; every byte of it is compared with its checksum."""
    # Torch costs seconds to import, and this module is imported by every kedro command.
    from diptych.parallel import storage

    storage.verify(checkpoint)
    state = storage.read_state(checkpoint)
    former = _read_spec(RunFolder(checkpoint.parents[1])).identity
    if state["identity_sha256"] != former.sha256:
        raise FormatError(
            f"The checkpoint {checkpoint.name} in the run '{parent.run_id}' is another run's "
            f"({state['identity_sha256'][:12]})",
            cure="Fork from the run that it belongs to",
        )
    _check_model(spec, stored=storage.stored_shapes(checkpoint), keeps=parent.keeps)


def _check_model(spec: RunSpec, *, stored: Mapping[str, tuple[int, ...]], keeps: Keeps) -> None:
    from diptych.model.inspect import inspect
    from diptych.parallel.storage import MODEL_PREFIX

    shape = inspect(spec.identity.model)
    held = {
        name.removeprefix(MODEL_PREFIX): size
        for name, size in stored.items()
        if name.startswith(MODEL_PREFIX) and not name.endswith(_STATISTICS)
    }
    differences = _differences(held, {each.name: each.shape for each in shape.parameters}, spec)
    if differences:
        raise ConfigError(
            f"The parent's model is another one: {_cut(differences)}",
            allowed="The same weights in the same shapes; what of them trains may differ",
            cure="Restore the parent's plan.model, or begin with its release (plan.model.weights)",
        )
    if keeps == "all":
        _check_moments([each.name for each in shape.parameters if each.trains], stored=stored)


def _check_moments(trained: Sequence[str], *, stored: Mapping[str, tuple[int, ...]]) -> None:
    from diptych.parallel.moments import EMA
    from diptych.parallel.storage import OPTIMIZER_PREFIX

    with_moments: set[str] = set()
    for name in stored:
        if name.startswith(OPTIMIZER_PREFIX) and not name.endswith(f".{EMA}"):
            # A state of eight bits is two tensors, `<name>.<moment>.codes` and `.scale`.
            moment = name.removeprefix(OPTIMIZER_PREFIX).removesuffix(".codes")
            with_moments.add(moment.removesuffix(".scale").rpartition(".")[0])
    without = [name for name in trained if name not in with_moments]
    if without:
        raise ConfigError(
            f"The parent has no moments of weights that train now: {_cut(without)}",
            cure="Set train.fork_keeps: weights, so that all moments begin anew, or freeze what "
            "the parent froze",
        )


def _differences(
    held: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]], spec: RunSpec
) -> list[str]:
    grows = spec.identity.model.resize_embeddings

    def differs(name: str) -> bool:
        # Rows of an embedding that has grown to the tokenizer are known to the ranks alone.
        return held[name][grows:] != tuple(wanted[name])[grows:]

    parts = [f"{name} is not in the parent" for name in wanted.keys() - held.keys()]
    parts += [f"{name} is in the parent alone" for name in held.keys() - wanted.keys()]
    parts += [
        f"{name} is {list(held[name])} in the parent and {list(wanted[name])} here"
        for name in wanted.keys() & held.keys()
        if differs(name)
    ]
    return sorted(parts)


def _cut(parts: Sequence[str]) -> str:
    more = f" and {len(parts) - _MOST} more" if len(parts) > _MOST else ""
    return "; ".join(parts[:_MOST]) + more
