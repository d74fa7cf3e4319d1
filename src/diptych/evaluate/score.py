"""Score a release on the held-out samples, with their images and without.

In: a proven release, the held-out shards and the buckets. Out: `scores` with intervals and one row
of predictions per question; the release's model card is filled. The model runs in fresh processes,
so nothing here imports torch.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import psutil
import pyarrow as pa
from pydantic import Field

from diptych.core.children import run_modules
from diptych.core.errors import ParityError
from diptych.core.files import write_text
from diptych.core.records import Buckets, Interval, Manifest, Parity, Scores, Section
from diptych.core.release import fill_score_section, release_sha256
from diptych.core.tables import PREDICTIONS
from diptych.data.bucket import bucket_name
from diptych.data.shards.reader import ShardReader
from diptych.evaluate.intervals import interval
from diptych.evaluate.tasks import ALL, Question, batches, collect, is_correct


class EvaluateParams(Section):
    """How many samples are scored, and how.

    `num_processes` null takes one process per GPU, or per core as far as memory allows. `batch`
    questions are answered at once; an answer is cut after `max_new_tokens`.
    """

    max_samples: int | None = Field(default=None, ge=1)
    batch: int = Field(default=64, ge=1)
    num_processes: int | None = Field(default=None, ge=1)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    max_new_tokens: int = Field(default=32, ge=1)
    num_resamples: int = Field(default=1_000, ge=1)
    seed: int = 0


def score(
    release: Path,
    parity: Parity,
    manifest: Manifest,
    shards: Path,
    buckets: Buckets,
    params: EvaluateParams,
) -> tuple[Scores, pa.Table]:
    """Answer every held-out question greedily and count exact matches.

    Args:
        release: the release's folder; its model card's score section is filled.
        parity: the proof that belongs to this release.
        manifest: names the held-out shards.
        shards: the shards' folder.
        buckets: gives each sample its bucket.
        params: how many samples, how long answers, how many processes.

    Returns:
        The scores, and `core.tables.PREDICTIONS` with one row per question. Without held-out
        samples nothing was measured, and both are empty.

    Raises:
        ParityError: the proof is of another release.
    """
    identity = release_sha256(release)
    _check_proof(parity, release_sha256=identity)
    questions = collect(
        ShardReader(shards, manifest=manifest, split="heldout"),
        buckets=buckets,
        max_samples=params.max_samples,
        seed=params.seed,
    )
    answers, generate_s = _ask(
        questions, release=release, manifest=manifest, shards=shards, params=params
    )
    predictions = tabulate(questions, answers=answers)
    scores = Scores(
        release_sha256=identity,
        manifest_sha256=manifest.sha256,
        **summarise(predictions, buckets=buckets, params=params),
        num_questions=len(questions),
        num_images=_count_images(questions),
        generate_s=generate_s,
    )
    fill_score_section(release, text=describe(scores, parity=parity))
    return scores, predictions


def tabulate(questions: Sequence[Question], *, answers: Sequence[tuple[str, str]]) -> pa.Table:
    """Join questions with their answers, (with images, without), into one row each."""
    rows = [
        {
            "key": question.key,
            "turn": question.turn,
            "kind": question.kind,
            "bucket": question.bucket,
            "question": question.text,
            "answer": question.answer,
            "prediction": seen,
            "blind_prediction": blind,
            "correct": is_correct(seen, answer=question.answer),
            "blind_correct": is_correct(blind, answer=question.answer),
            "image_key": question.image_key,
        }
        for question, (seen, blind) in zip(questions, answers, strict=True)
    ]
    return pa.Table.from_pylist(rows, schema=PREDICTIONS)


def summarise(
    predictions: pa.Table, *, buckets: Buckets, params: EvaluateParams
) -> dict[str, dict[str, Interval]]:
    """Average predictions per kind, over all kinds ('all'), per bucket and per source.

    Each average has its interval.

    Args:
        predictions: `core.tables.PREDICTIONS`.
        buckets: name the buckets.
        params: the number of resamples and their seed.
    """
    rows = predictions.to_pylist()

    def group(field: str, name: Callable[[dict[str, Any]], str]) -> dict[str, Interval]:
        members: dict[str, list[dict[str, Any]]] = {}
        for row in rows:
            members.setdefault(name(row), []).append(row)
        return {
            label: interval(
                [row[field] for row in members[label]],
                units=[row["image_key"] for row in members[label]],
                num_resamples=params.num_resamples,
                seed=params.seed,
            )
            for label in sorted(members)
        }

    return {
        "exact_match": group("correct", lambda row: row["kind"]) | group("correct", lambda _: ALL),
        "blind_exact_match": group("blind_correct", lambda row: row["kind"])
        | group("blind_correct", lambda _: ALL),
        "exact_match_by_bucket": group("correct", lambda row: bucket_name(buckets, row["bucket"])),
        "exact_match_by_source": group("correct", lambda row: row["key"].partition("/")[0]),
    }


def describe(scores: Scores, *, parity: Parity) -> str:
    """Write the model card's score section."""
    if not scores.num_questions:
        return "Not scored: no sample was held out."
    lines = [
        "Exact match on held-out questions, case and white space aside, greedy decoding; 95% "
        "bootstrap intervals over images. Blind: the same questions with the images greyed out.",
        "",
        "| questions | exact match | blind | n |",
        "| --- | ---: | ---: | ---: |",
    ]
    for kind, seen in scores.exact_match.items():
        blind = scores.blind_exact_match[kind]
        lines.append(f"| {kind} | {_percent(seen)} | {_percent(blind)} | {seen.n} |")
    if len(scores.exact_match_by_source) > 1:
        lines += ["", "| source | exact match | n |", "| --- | ---: | ---: |"]
        lines += [
            f"| {source} | {_percent(found)} | {found.n} |"
            for source, found in scores.exact_match_by_source.items()
        ]
    lines += [
        "",
        f"Largest logit difference to the trained model: {parity.max_abs:.2g} "
        f"(at most {parity.tolerance:g} is allowed) over {parity.num_samples} samples.",
    ]
    return "\n".join(lines)


def _percent(found: Interval) -> str:
    return f"{found.value:.3f} ({found.low:.3f} to {found.high:.3f})"


def _check_proof(parity: Parity, *, release_sha256: str) -> None:
    if not parity.passed or parity.release_sha256 != release_sha256:
        raise ParityError(
            f"The release {release_sha256[:12]} is not proven: the proof is of "
            f"{parity.release_sha256[:12]}{'' if parity.passed else ', and failed'}",
            allowed="Only a release whose parity has passed is scored",
            cure="Export again: `kedro run --pipelines=export,evaluate`",
        )


def _ask(
    questions: Sequence[Question],
    *,
    release: Path,
    manifest: Manifest,
    shards: Path,
    params: EvaluateParams,
) -> tuple[list[tuple[str, str]], float]:
    """Answer questions in fresh processes; return (sighted, blind) per question and the seconds."""
    grouped = batches(questions, size=params.batch)
    num_parts = min(len(grouped), params.num_processes or _num_processes(params, release=release))
    answers: dict[str, list[str]] = {}
    generate_s = 0.0
    with tempfile.TemporaryDirectory(prefix="diptych-evaluate-") as name:
        job = Path(name)
        write_text(job / "manifest.json", text=manifest.model_dump_json())
        for part in range(num_parts):
            asked = [
                [_ask_for(questions, index=i) for i in batch] for batch in grouped[part::num_parts]
            ]
            write_text(job / f"questions-{part}.json", text=json.dumps(asked, ensure_ascii=False))
        common = ["diptych.evaluate.generate", "--job", str(job), "--release", str(release)]
        common += ["--shards", str(shards), "--device", params.device]
        common += ["--max-new-tokens", str(params.max_new_tokens)]
        run_modules(
            [[*common, "--part", str(part)] for part in range(num_parts)],
            what="answer questions with the release",
        )
        for part in range(num_parts):
            result = json.loads((job / f"answers-{part}.json").read_text(encoding="utf-8"))
            answers |= result["answers"]
            generate_s = max(generate_s, result["generate_s"])
    ordered = (answers[str(index)] for index in range(len(questions)))
    return [(seen, blind) for seen, blind in ordered], generate_s


def _ask_for(questions: Sequence[Question], *, index: int) -> dict[str, Any]:
    question = questions[index]
    return {
        "index": index,
        "row": question.row,
        "num_images": question.num_images,
        "messages": [message.model_dump(mode="json") for message in question.messages],
    }


def _num_processes(params: EvaluateParams, *, release: Path) -> int:
    """Take one process per GPU; without, one per usable core that has room for the weights."""
    num_gpus = 0 if params.device == "cpu" else count_gpus()
    if num_gpus:
        return num_gpus
    weights_bytes = sum(path.stat().st_size for path in release.glob("*.safetensors"))
    # Twice the weights: the file is mapped while the model is filled, then batches take their part.
    room = psutil.virtual_memory().available // max(1, 2 * weights_bytes)
    return int(max(1, min(len(os.sched_getaffinity(0)), room)))


def count_gpus() -> int:
    """Count the GPUs that a child would see, without importing torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
    try:
        import pynvml
    except ImportError:
        return 0
    try:
        pynvml.nvmlInit()
        return int(pynvml.nvmlDeviceGetCount())
    except pynvml.NVMLError:  # no driver, so no GPU
        return 0


def _count_images(questions: Sequence[Question]) -> int:
    shown = {question.row: 0 for question in questions}
    for question in questions:
        shown[question.row] = max(shown[question.row], question.num_images)
    return sum(shown.values())
