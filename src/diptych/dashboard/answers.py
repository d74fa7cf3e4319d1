"""Answers of a release on held-out questions, beside their images: files of an evaluation in.

They are shown for the run that the release was made of, which the proof of its export names.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from diptych.core.records import Parity, Scores

MEDIA_TYPES = ("image/jpeg", "image/png", "image/webp", "image/gif")
_MOST_ANSWERS = 24
_MOST_IMAGE_BYTES = 512 * 1024
_COLUMNS = (
    "key",
    "turn",
    "kind",
    "question",
    "answer",
    "prediction",
    "blind_prediction",
    "correct",
)


@dataclass(frozen=True)
class Evaluation:
    """Where a project's evaluation lies; a file that is not there shows nothing."""

    parity: Path
    scores: Path
    predictions: Path
    examples: Path

    def run_id(self) -> str | None:
        """Return which run the predictions are of; None where the files do not say it."""
        try:
            parity = Parity.model_validate_json(self.parity.read_text("utf-8"))
            scores = Scores.model_validate_json(self.scores.read_text("utf-8"))
        except (OSError, ValueError):
            return None
        return parity.run_id if parity.release_sha256 == scores.release_sha256 else None


@dataclass(frozen=True)
class Answer:
    """One question with what was right and what was answered; images as a browser takes them."""

    kind: str
    question: str
    answer: str
    prediction: str
    blind_prediction: str
    correct: bool
    images: tuple[str, ...] = ()


def read_answers(evaluation: Evaluation | None, *, run_id: str) -> list[Answer]:
    """Read some answers of a run's release, wrong ones first; none where it was not evaluated.

    With images where the report's examples are of the same predictions.
    """
    if evaluation is None or evaluation.run_id() != run_id:
        return []
    try:
        predictions = pq.read_table(evaluation.predictions, columns=list(_COLUMNS))
    except (OSError, ValueError, KeyError, pa.ArrowException):
        return []
    rows = _examples(evaluation.examples, predictions=predictions)
    if not rows:
        order = [("correct", "ascending"), ("kind", "ascending"), ("key", "ascending")]
        rows = predictions.sort_by(order).slice(0, _MOST_ANSWERS).to_pylist()
    return [_answer(row) for row in rows[:_MOST_ANSWERS]]


def _examples(path: Path, *, predictions: pa.Table) -> list[dict[str, Any]]:
    """Read the report's examples, if these predictions still hold them."""
    try:
        rows = pq.read_table(path, columns=[*_COLUMNS, "images", "image_types"]).to_pylist()
    except (OSError, ValueError, KeyError, pa.ArrowException):
        return []
    columns = [predictions.column(name).to_pylist() for name in ("key", "turn", "prediction")]
    known = set(zip(*columns, strict=True))
    return [row for row in rows if (row["key"], row["turn"], row["prediction"]) in known]


def _answer(row: dict[str, Any]) -> Answer:
    texts = {name: str(row[name]) for name in _COLUMNS[2:-1]}
    images = _images(zip(row.get("image_types") or (), row.get("images") or (), strict=False))
    return Answer(**texts, correct=bool(row["correct"]), images=tuple(images))


def _images(found: Iterable[tuple[str, bytes]]) -> Iterable[str]:
    for media_type, data in found:
        if media_type in MEDIA_TYPES and len(data) <= _MOST_IMAGE_BYTES:
            yield f"data:{media_type};base64,{base64.b64encode(data).decode()}"
