"""Questions: every assistant turn of a held-out sample, the turns before it given as they are.

In: a shard reader and the buckets. Out: questions, their batches, and what counts as a right
answer. Knows nothing of models; images are read only to name the bootstrap's unit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from diptych.core.records import IMAGE_PLACEHOLDER, Buckets, Message
from diptych.data.bucket import bucket_of
from diptych.data.shards.reader import ShardReader

UNNAMED_KIND = "other"
ALL = "all"


@dataclass(frozen=True, kw_only=True)
class Question:
    """One assistant turn to be answered; `num_images` of the sample's images come before it."""

    row: int
    key: str
    turn: int
    kind: str
    bucket: int
    messages: tuple[Message, ...]
    answer: str
    num_images: int
    area_px: int
    image_key: str

    @property
    def text(self) -> str:
        """The last turn before the answer, as a person reads it."""
        return self.messages[-1].text if self.messages else ""


def collect(
    reader: ShardReader, *, buckets: Buckets, max_samples: int | None, seed: int
) -> tuple[Question, ...]:
    """Make the questions of the held-out samples, in the shards' order.

    Args:
        reader: random access to the held-out samples.
        buckets: the boundaries that give each sample its bucket.
        max_samples: draw only so many samples (without replacement, by `seed`); None for all.
        seed: of that draw.
    """
    rows = np.arange(reader.num_samples)
    if max_samples is not None and max_samples < len(rows):
        rows = np.sort(np.random.default_rng(seed).choice(rows, size=max_samples, replace=False))
    questions: list[Question] = []
    for row in rows.tolist():
        questions.extend(_questions_of(row, reader=reader, buckets=buckets))
    return tuple(questions)


def batches(questions: Sequence[Question], *, size: int) -> tuple[tuple[int, ...], ...]:
    """Group questions of near equal prompt length; indices into `questions`, largest first.

    The groups depend on the questions and the size alone, so that a prediction never depends on
    how many processes share the work.
    """
    order = sorted(
        range(len(questions)),
        key=lambda index: (
            -questions[index].area_px,
            -sum(len(message.text) for message in questions[index].messages),
            index,
        ),
    )
    return tuple(tuple(order[at : at + size]) for at in range(0, len(order), size))


def is_correct(prediction: str, *, answer: str) -> bool:
    """Compare two answers but for case and the amount of white space."""
    return normalise(prediction) == normalise(answer)


def normalise(text: str) -> str:
    """Fold case and shrink every run of white space to one space."""
    return " ".join(text.split()).casefold()


def image_key(images: Sequence[bytes], *, key: str) -> str:
    """Name the bootstrap's unit: the images' content, or the sample's key where it has none."""
    if not images:
        return key
    digest = hashlib.sha256()
    for image in images:
        digest.update(hashlib.sha256(image).digest())
    return digest.hexdigest()


def _questions_of(row: int, *, reader: ShardReader, buckets: Buckets) -> Iterator[Question]:
    stored = reader.read(row)
    sample = stored.sample
    areas_px = [image.width_px * image.height_px for image in sample.images]
    aspect = sample.images[0].width_px / sample.images[0].height_px if sample.images else 0.0
    bucket = bucket_of(buckets, sum(areas_px), aspect)
    unit = image_key(stored.images, key=sample.key)
    answers = [at for at, turn in enumerate(sample.messages) if turn.role == "assistant"]
    for turn, at in enumerate(answers):
        before = sample.messages[:at]
        num_images = sum(message.text.count(IMAGE_PLACEHOLDER) for message in before)
        yield Question(
            row=row,
            key=sample.key,
            turn=turn,
            kind=sample.kinds[turn] if sample.kinds else UNNAMED_KIND,
            bucket=bucket,
            messages=before,
            answer=sample.messages[at].text,
            num_images=num_images,
            area_px=sum(areas_px[:num_images]),
            image_key=unit,
        )
