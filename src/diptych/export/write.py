"""Write a release: a run's checkpoint as a folder that transformers loads by itself.

In: a run, its processor and manifest. Out: safetensors, config, generation config, processor,
model card and checksums, whole or not at all. Knows nothing of how the weights were trained.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, field_validator

from diptych.core.errors import FormatError
from diptych.core.files import replacing_folder, write_text
from diptych.core.hashing import canonical_json
from diptych.core.records import Manifest, ModelSpec, ProcessorInfo, Run, RunSpec, Section
from diptych.core.release import (
    ADAPTER_FOLDER,
    CARD,
    CHECKSUMS,
    fill_score_section,
    read_score_section,
    release_checksums,
    release_sha256,
)
from diptych.data.processor import INFO_NAME, read_processor_info
from diptych.export.card import render
from diptych.export.chosen import at_checkpoint
from diptych.monitor.run_folder import RunFolder

if TYPE_CHECKING:
    import torch


class ExportParams(Section):
    """How the release is written and how its parity is proven.

    `checkpoint`: the run's last, the best by `train.keep_best`, or the one of a step. `weights`: as
    they were trained, or their exponential moving average, where `train.ema_decay` keeps one.
    `dtype` bf16 halves the files by rounding every weight to 8 significant bits.
    `lora` says where trained adapters go: into their layers' weights, or a folder of their own.
    `num_samples` are compared; their logits may differ by `tolerance` at most.
    """

    checkpoint: Literal["last", "best"] | Annotated[int, Field(ge=1)] = "last"
    weights: Literal["trained", "ema"] = "trained"
    dtype: Literal["fp32", "bf16"] = "fp32"
    lora: Literal["merged", "apart"] = "merged"
    max_shard_bytes: int = Field(default=5_000_000_000, ge=1)
    num_samples: int = Field(default=16, ge=1)
    tolerance: float = Field(default=1e-5, gt=0)

    @field_validator("checkpoint", mode="before")
    @classmethod
    def _check_checkpoint(cls, value: Any) -> Any:
        is_step = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        if value not in ("last", "best") and not is_step:
            raise ValueError(f"it is {value!r}; use last, best, or a step from 1")
        return value


def write(run: Run, processor: Path, manifest: Manifest, params: ExportParams, folder: str) -> Path:
    """Write the release of a run's checkpoint in place of the one that is there.

    Args:
        run: what was trained.
        processor: the processor's folder, copied into the release.
        manifest: the data's identity, for the model card.
        params: the precision of the weights and the size of a file.
        folder: the release's folder.

    Returns:
        The release's folder.

    Raises:
        FormatError: the checkpoint, the processor or the manifest is not the run's, or the
            checkpoint has other weights than the model, or no mean of them.
    """
    spec = read_run_spec(run)
    run = at_checkpoint(run, chosen=params.checkpoint)
    info = read_processor_info(processor)
    _check_identity(spec, run=run, info=info, manifest=manifest)
    target = Path(folder)
    with replacing_folder(target) as partial:
        _write_model(partial, spec=spec, info=info, checkpoint=Path(run.checkpoint), params=params)
        _copy_processor(processor, target=partial)
        card = render(
            run=run,
            spec=spec,
            manifest=manifest,
            weights=params.weights,
            dtype=params.dtype,
            release=partial,
        )
        write_text(partial / CARD, text=card)
        checksums = release_checksums(partial)
        write_text(partial / CHECKSUMS, text=canonical_json(checksums) + "\n")
        _keep_scores(target, partial=partial)
    return target


def read_run_spec(run: Run) -> RunSpec:
    """Read the run_spec out of a run's folder.

    Raises:
        FormatError: it is missing or damaged.
    """
    try:
        return RunFolder(Path(run.folder)).read_spec()
    except (OSError, ValueError) as error:
        raise FormatError(
            f"The folder of run {run.run_id} has no readable run_spec: {error}",
            cure="Train it again: `kedro run --pipelines=train`",
        ) from error


def check_names(found: Iterable[str], *, wanted: Iterable[str]) -> None:
    """Compare a checkpoint's weights with the model's by name (promise 4).

    Raises:
        FormatError: one is missing or superfluous.
    """
    have, need = set(found), set(wanted)
    missing, extra = sorted(need - have), sorted(have - need)
    if missing or extra:
        parts = [f"{name} is missing" for name in missing] + [f"{name} is extra" for name in extra]
        rest = f" and {len(parts) - 5} more" if len(parts) > 5 else ""
        raise FormatError(
            f"The checkpoint has other weights than the model: {'; '.join(parts[:5])}{rest}",
            allowed="Every weight of the model once, by its full name",
            cure="Export with the code and the parameters that the run was trained with",
        )


def _check_identity(spec: RunSpec, *, run: Run, info: ProcessorInfo, manifest: Manifest) -> None:
    identity = spec.identity
    pairs = (
        ("run", run.identity_sha256, identity.sha256),
        ("processor", info.sha256, identity.processor_sha256),
        ("manifest", manifest.sha256, identity.manifest_sha256),
    )
    for name, found, wanted in pairs:
        if found != wanted:
            raise FormatError(
                f"The {name} is {found[:12]}, the run {spec.run_id} was trained with {wanted[:12]}",
                allowed="A release has the data and the processor of its own run",
                cure="Train again: `kedro run --pipelines=train,export`",
            )


def _write_model(
    partial: Path, *, spec: RunSpec, info: ProcessorInfo, checkpoint: Path, params: ExportParams
) -> None:
    from diptych.export.adapters import take_apart, write_adapter
    from diptych.model.assemble import build
    from diptych.parallel.storage import read_weights

    def outline(model: ModelSpec) -> Any:
        # On the meta device, so that the weights are in memory once.
        return build(model, tokens=info.tokens, image=info.image, seed=None, device="meta")

    weights = read_weights(checkpoint, weights=params.weights)
    trained = spec.identity.model
    check_names(weights, wanted=(name for name, _ in outline(trained).named_parameters()))
    released = take_apart(weights, spec=trained, info=info, form=params.lora)
    dtype = torch_dtype(params.dtype)
    model = outline(released.model)
    rounded = {name: tensor.to(dtype) for name, tensor in released.weights.items()}
    model.load_state_dict(rounded, strict=False, assign=True)
    model.tie_weights()
    if released.adapter:
        adapter = {name: tensor.to(dtype) for name, tensor in released.adapter.items()}
        write_adapter(partial / ADAPTER_FOLDER, adapter=adapter, spec=trained)
    model.config.dtype = dtype
    model.generation_config = _greedy(info)
    with _quiet():
        model.save_pretrained(partial, max_shard_size=params.max_shard_bytes)


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide transformers' progress bar and deepspeed's warning that there is no GPU."""
    from transformers.utils import logging as theirs

    deepspeed = logging.getLogger("DeepSpeed")
    had_bar = theirs.is_progress_bar_enabled()
    theirs.disable_progress_bar()
    deepspeed.addFilter(_drop)
    try:
        yield
    finally:
        deepspeed.removeFilter(_drop)
        if had_bar:
            theirs.enable_progress_bar()


def _drop(record: logging.LogRecord) -> bool:
    return False


def torch_dtype(name: str) -> torch.dtype:
    """Return the precision that weights are written in."""
    import torch

    return {"fp32": torch.float32, "bf16": torch.bfloat16}[name]


def _greedy(info: ProcessorInfo) -> Any:
    from transformers import GenerationConfig

    return GenerationConfig(
        do_sample=False,
        num_beams=1,
        eos_token_id=info.tokens.eos,
        pad_token_id=info.tokens.pad,
    )


def _copy_processor(processor: Path, *, target: Path) -> None:
    for path in sorted(processor.rglob("*")):
        name = path.relative_to(processor)
        if path.is_file() and name.as_posix() != INFO_NAME:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target / name)


def _keep_scores(target: Path, *, partial: Path) -> None:
    """Carry the scores in the card over when the new release is the old one byte for byte."""
    card = target / CARD
    if card.is_file() and release_sha256(target) == release_sha256(partial):
        section = read_score_section(card.read_text(encoding="utf-8"))
        if section is not None:
            fill_score_section(partial, text=section)
