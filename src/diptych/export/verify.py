"""Prove a release: what transformers computes from the folder is what was trained (promise 4).

In: a release and its run. Out: `parity`, or a ParityError that names the difference, the first
sample that differs and the likely reason. The release runs in a fresh process.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from diptych.core.children import run_modules
from diptych.core.errors import ParityError, RunError
from diptych.core.hashing import sha256_json
from diptych.core.records import Manifest, Parity, Run, RunSpec
from diptych.core.release import CHECKSUMS, release_checksums
from diptych.data.processor import read_processor_info
from diptych.data.shards.reader import ShardReader
from diptych.export.chosen import at_checkpoint
from diptych.export.samples import Output, ParitySample, choose, read_outputs, write_samples
from diptych.export.write import ExportParams, read_run_spec, torch_dtype

_SMALL_MODEL_BYTES = 1 << 28


@dataclass(frozen=True, kw_only=True)
class Difference:
    """How far two runs of the same samples are apart, and which sample differs first."""

    max_abs: float
    max_rel: float
    num_logits: int
    tokens_equal: bool
    pixels_max_abs: float
    first: str | None


def verify(release: Path, run: Run, params: ExportParams) -> Parity:
    """Compare a release with the checkpoint that it was written from.

    The files' checksums, the names and the bits of the weights, token ids, pixels and logits are
    compared. The release is loaded in fp32 by AutoModelForImageTextToText and AutoProcessor; a
    bf16 release is held against the trained weights rounded to bf16, so the tolerance is the same.
    Merged adapters in fp32 are held against the model with its adapters beside the layers; in bf16
    the weights are merged before they are rounded, in the release as in the model.

    Args:
        release: the release's folder.
        run: the run that it was written from.
        params: which weights were released, how many samples, and how far logits may differ.

    Raises:
        ParityError: anything differs.
    """
    from diptych.export.adapters import take_apart
    from diptych.export.trained import compare_weights, run_checkpoint
    from diptych.parallel.storage import read_weights

    spec = read_run_spec(run)
    run = at_checkpoint(run, chosen=params.checkpoint)
    release_sha256 = _check_files(release)
    weights = read_weights(Path(run.checkpoint), weights=params.weights)
    info = read_processor_info(Path(spec.placement.processor))
    trained_model = spec.identity.model
    wanted = take_apart(weights, spec=trained_model, info=info, form=params.lora)
    report = compare_weights(release, wanted=wanted, info=info)
    _refuse_weights(missing=report.missing, extra=report.extra, changed=report.changed)
    samples = choose(_open_shards(spec), num_samples=params.num_samples)
    assert samples, "a run has trained on something, so there is something to compare"
    num_threads = _num_threads(release)
    released, missing, extra = _run_release(release, samples=samples, num_threads=num_threads)
    _refuse_weights(missing=missing, extra=extra, changed=())
    is_rounded_sum = params.lora == "merged" and params.dtype == "bf16"
    trained = run_checkpoint(
        samples,
        spec=spec,
        model_spec=wanted.model if is_rounded_sum else trained_model,
        info=info,
        weights=wanted.weights if is_rounded_sum else weights,
        dtype=torch_dtype(params.dtype),
        num_threads=num_threads,
    )
    found = compare(
        released,
        trained=trained,
        keys=[sample.key for sample in samples],
        tolerance=params.tolerance,
    )
    _refuse_difference(found, tolerance=params.tolerance)
    return Parity(
        release_sha256=release_sha256,
        run_id=run.run_id,
        max_abs=found.max_abs,
        max_rel=found.max_rel,
        tolerance=params.tolerance,
        num_samples=len(samples),
        num_logits=found.num_logits,
        missing_keys=missing,
        extra_keys=extra,
        tokens_equal=found.tokens_equal,
        passed=True,
    )


def compare(
    released: Sequence[Output], *, trained: Sequence[Output], keys: Sequence[str], tolerance: float
) -> Difference:
    """Measure how far two runs of the same samples are apart.

    Args:
        released: what the release computed.
        trained: what the trained model computed.
        keys: the samples' keys.
        tolerance: above it a sample counts as differing.

    Returns:
        The largest absolute difference of logits (infinite where shapes differ or a logit is not
        finite), the same relative to the largest trained logit, and the first sample that differs.
    """
    max_abs = largest = pixels_max_abs = 0.0
    num_logits = 0
    first: str | None = None
    tokens_equal = True
    for theirs, ours, key in zip(released, trained, keys, strict=True):
        same_tokens = np.array_equal(theirs.input_ids, ours.input_ids)
        distance = _distance(theirs.logits, ours.logits)
        if first is None and not (same_tokens and distance <= tolerance):
            first = key
        tokens_equal &= same_tokens
        max_abs = max(max_abs, distance)
        pixels_max_abs = max(pixels_max_abs, _distance(theirs.pixels, ours.pixels))
        largest = max(largest, float(np.abs(ours.logits).max(initial=0.0)))
        num_logits += ours.logits.size
    return Difference(
        max_abs=max_abs,
        max_rel=max_abs / largest if largest else max_abs,
        num_logits=num_logits,
        tokens_equal=tokens_equal,
        pixels_max_abs=pixels_max_abs,
        first=first,
    )


def _distance(left: np.ndarray, right: np.ndarray) -> float:
    if left.shape != right.shape:
        return float("inf")
    distance = float(np.abs(left - right).max(initial=0.0))
    return distance if np.isfinite(distance) else float("inf")


def _check_files(release: Path) -> str:
    """Compare every file with its checksum; return the release's hash."""
    found = release_checksums(release)
    try:
        wanted: dict[str, str] = json.loads((release / CHECKSUMS).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ParityError(
            f"The release has no readable {CHECKSUMS}: {error}", cure=_EXPORT_AGAIN
        ) from error
    differing = sorted(
        name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name)
    )
    if differing:
        raise ParityError(
            f"Files of the release are not as they were written: {_some(differing)}",
            allowed="Only the model card may change after the export",
            cure=_EXPORT_AGAIN,
        )
    return sha256_json(found)


def _refuse_weights(
    *, missing: Sequence[str], extra: Sequence[str], changed: Sequence[str]
) -> None:
    parts = [
        f"{len(names)} {what} ({_some(names)})"
        for names, what in (
            (missing, "missing"),
            (extra, "extra"),
            (changed, "with other values than the checkpoint"),
        )
        if names
    ]
    if parts:
        raise ParityError(
            f"The release has not the trained weights: {', '.join(parts)}",
            allowed="Every weight of the checkpoint once, with its value",
            cure=_EXPORT_AGAIN,
        )


def _refuse_difference(found: Difference, *, tolerance: float) -> None:
    if found.first is None:
        return
    if not found.tokens_equal:
        reason = "the token ids differ, so the tokenizer or the chat template is another one"
    elif found.pixels_max_abs > tolerance:
        reason = (
            f"the pixels differ by {found.pixels_max_abs:.3g}, so the image settings are others"
        )
    elif not np.isfinite(found.max_abs):
        reason = "a logit is not finite, or the vocabularies differ"
    else:
        reason = (
            "weights, tokens and pixels are equal, so the config computes something else "
            "(or, just above the tolerance, the arithmetic is less exact than float32)"
        )
    raise ParityError(
        f"The release does not compute what was trained: logits differ by {found.max_abs:.3g}, "
        f"first for sample '{found.first}'; {reason}",
        allowed=f"At most {tolerance:g}, and equal tokens",
        cure=_EXPORT_AGAIN,
    )


def _run_release(
    release: Path, *, samples: Sequence[ParitySample], num_threads: int
) -> tuple[tuple[Output, ...], tuple[str, ...], tuple[str, ...]]:
    """Run the release in a fresh process; return outputs, missing and extra names."""
    with tempfile.TemporaryDirectory(prefix="diptych-parity-") as name:
        folder = Path(name)
        write_samples(folder, samples=samples)
        command = ["diptych.export.reload", "--release", str(release), "--samples", str(folder)]
        try:
            run_modules([command], what="load and run the release", num_threads=num_threads)
        except RunError as error:
            raise ParityError(
                "transformers cannot load and run the release", cure=str(error)
            ) from error
        loading = json.loads((folder / "loading.json").read_text(encoding="utf-8"))
        missing = sorted(loading["missing_keys"] + loading["mismatched_keys"])
        return (
            read_outputs(folder / "outputs.safetensors"),
            tuple(missing),
            tuple(loading["unexpected_keys"]),
        )


def _open_shards(spec: RunSpec) -> ShardReader:
    path = Path(spec.placement.manifest)
    manifest = Manifest.model_validate_json(path.read_text(encoding="utf-8"))
    # Held-out samples, or training samples where nothing is held out.
    split = "heldout" if manifest.num_samples("heldout") else "train"
    return ShardReader(Path(spec.placement.shards), manifest=manifest, split=split)


def _num_threads(release: Path) -> int:
    """Take all cores for a large model; a small one loses more than it gains by a second thread."""
    num_bytes = sum(path.stat().st_size for path in release.glob("*.safetensors"))
    return 1 if num_bytes < _SMALL_MODEL_BYTES else len(os.sched_getaffinity(0))


def _some(names: Sequence[str], *, most: int = 3) -> str:
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest


_EXPORT_AGAIN = "Export again: `kedro run --pipelines=export`"
