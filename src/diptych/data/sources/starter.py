"""Build the starter data: questions about handwritten digits, from scikit-learn's real scans.

In: nothing but a seed (the 1,797 scans of 8x8 pixels are in scikit-learn's wheel). Out: a folder in
LLaVA's form (`train.json`, `heldout.json`, `images/`), the same bytes for the same seed. Training
and held-out samples share no scan. Knows nothing of models or processors.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

_HELDOUT_SCANS = 200
_DIGIT_PX = 16
_LARGE_DIGIT_PX = 32
_MAX_WIDTH_PX = 144
_JPEG_QUALITY = 92
_HELDOUT_STRIDE = 7
"""Text-only questions about multiples of this are held out, the others are for training."""

_READ = ("Read the number.", "Which number is shown?", "What does the image say?")
_READ_LONG = ("Read all digits.", "Write down every digit.")
_COUNT_ALL = ("How many digits are there?", "Count the digits.")
_COUNT_ONE = ("How often does {digit} occur?", "Count the digit {digit}.")
_COMPARE = ("Which number is larger, first or second?", "Is the first or the second larger?")
_AFTER = ("Which number comes after {number}?", "What is {number} plus one?")
_BEFORE = ("Which number comes before {number}?", "What is {number} minus one?")
_FIRST = ("What is the first digit of {number}?", "Which digit does {number} start with?")


@dataclass
class _Scans:
    """The scans of one split, enlarged, and which of them show each digit.

    `ink` is by side length, [N, side, side] float32 from 0 (paper) to 1 (ink).
    """

    ink: dict[int, np.ndarray]
    by_digit: list[np.ndarray]


@dataclass
class _Draft:
    """A sample in the making: the turns so far and its images, not yet written."""

    rng: np.random.Generator
    scans: _Scans
    is_heldout: bool
    turns: list[tuple[str, str, str]] = field(default_factory=list)
    images: list[np.ndarray] = field(default_factory=list)

    def ask(self, phrasings: tuple[str, ...], *, answer: str, kind: str, **values: Any) -> None:
        """Add a question in one of its phrasings, with its answer."""
        phrasing = phrasings[int(self.rng.integers(len(phrasings)))]
        self.turns.append((kind, phrasing.format(**values), answer))

    def number(self, *, fewest: int, most: int) -> str:
        """Draw a number; its count of digits is uniform, its first digit is not 0."""
        length = int(self.rng.integers(fewest, most + 1))
        digits = self.rng.integers(0, 10, size=length)
        if length > 1:
            digits[0] = self.rng.integers(1, 10)
        return "".join(str(digit) for digit in digits)


def build_starter(
    folder: Path, *, num_train: int = 4000, num_heldout: int = 600, seed: int = 0
) -> Path:
    """Write the starter data into a folder, at once or not at all.

    Args:
        folder: Where `train.json`, `heldout.json` and `images/` go.
        num_train: Samples of the training split.
        num_heldout: Samples of the held-out split.
        seed: Decides every scan, size, phrasing and encoding.

    Returns:
        The folder.
    """
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    (partial / "images").mkdir(parents=True)
    try:
        train, heldout = _split_scans(seed)
        for split, scans, num_samples in (
            ("train", train, num_train),
            ("heldout", heldout, num_heldout),
        ):
            rows = [
                _write_sample(partial, split=split, number=number, scans=scans, seed=seed)
                for number in range(num_samples)
            ]
            lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
            (partial / f"{split}.json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")
        _move_into(folder, partial=partial)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def is_starter(folder: Path) -> bool:
    """Tell whether a folder holds complete starter data."""
    return (folder / "train.json").is_file() and (folder / "heldout.json").is_file()


def _move_into(folder: Path, *, partial: Path) -> None:
    """Move the images first and the annotations last: with them the folder counts as complete."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("train.json", "heldout.json"):
        (folder / name).unlink(missing_ok=True)
    shutil.rmtree(folder / "images", ignore_errors=True)
    for name in ("images", "heldout.json", "train.json"):
        os.replace(partial / name, folder / name)


def _split_scans(seed: int) -> tuple[_Scans, _Scans]:
    from sklearn.datasets import load_digits

    flat, labels = load_digits(return_X_y=True)
    scans = np.asarray(flat, dtype=np.float32).reshape(-1, 8, 8) / 16
    enlarged = {
        side_px: _enlarge(scans, side_px=side_px) for side_px in (_DIGIT_PX, _LARGE_DIGIT_PX)
    }
    order = np.random.default_rng(seed).permutation(len(scans))
    parts = []
    for rows in (order[_HELDOUT_SCANS:], order[:_HELDOUT_SCANS]):
        by_digit = [np.flatnonzero(labels[rows] == digit) for digit in range(10)]
        ink = {side_px: images[rows] for side_px, images in enlarged.items()}
        parts.append(_Scans(ink=ink, by_digit=by_digit))
    return parts[0], parts[1]


def _enlarge(scans: np.ndarray, *, side_px: int) -> np.ndarray:
    """Enlarge scans from [N, 8, 8] to [N, side, side], float32 from 0 to 1."""
    size = (side_px, side_px)
    images = [Image.fromarray(scan).resize(size, Image.Resampling.BICUBIC) for scan in scans]
    return np.clip(np.stack([np.asarray(image) for image in images]), 0, 1)


def _write_sample(
    folder: Path, *, split: str, number: int, scans: _Scans, seed: int
) -> dict[str, Any]:
    rng = np.random.default_rng([seed, int(split == "heldout"), number])
    draft = _Draft(rng=rng, scans=scans, is_heldout=split == "heldout")
    names = list(_MAKERS)
    shares = [_MAKERS[name][0] for name in names]
    _MAKERS[names[int(rng.choice(len(names), p=shares))]][1](draft)
    sample_id = f"{split}-{number:05d}"
    paths = [
        _save(pixels, folder=folder, stem=f"{sample_id}-{place}", rng=rng)
        for place, pixels in enumerate(draft.images)
    ]
    conversations = []
    for turn, (_, question, answer) in enumerate(draft.turns):
        prefix = "<image>\n" * len(paths) if turn == 0 else ""
        conversations.append({"from": "human", "value": prefix + question})
        conversations.append({"from": "gpt", "value": answer})
    row: dict[str, Any] = {"id": sample_id}
    if paths:
        row["image"] = paths[0] if len(paths) == 1 else paths
    return row | {"conversations": conversations, "kinds": [turn[0] for turn in draft.turns]}


def _make_read(draft: _Draft) -> None:
    number = draft.number(fewest=1, most=4)
    draft.images.append(_compose(draft, digits=number))
    draft.ask(_READ, answer=number, kind="read")
    _maybe_count(draft, digits=number)


def _make_read_long(draft: _Draft) -> None:
    number = draft.number(fewest=5, most=8)
    num_rows = 1 + int(draft.rng.random() < 0.5)
    draft.images.append(_compose(draft, digits=number, num_rows=num_rows))
    draft.ask(_READ_LONG, answer=number, kind="read_long")
    _maybe_count(draft, digits=number)


def _make_count(draft: _Draft) -> None:
    number = draft.number(fewest=1, most=8)
    num_rows = 2 if len(number) > 2 and draft.rng.random() < 0.3 else 1
    draft.images.append(_compose(draft, digits=number, num_rows=num_rows, may_be_large=True))
    _count(draft, digits=number)


def _make_compare(draft: _Draft) -> None:
    first = second = draft.number(fewest=1, most=3)
    while int(first) == int(second):
        second = draft.number(fewest=1, most=3)
    draft.images += [
        _compose(draft, digits=number, may_be_large=True) for number in (first, second)
    ]
    answer = "first" if int(first) > int(second) else "second"
    draft.ask(_COMPARE, answer=answer, kind="compare")


def _make_text(draft: _Draft) -> None:
    number = 0
    while number == 0 or (number % _HELDOUT_STRIDE == 0) != draft.is_heldout:
        number = int(draft.number(fewest=1, most=4))
    answers = (
        (_AFTER, str(number + 1)),
        (_BEFORE, str(number - 1)),
        (_FIRST, str(number)[0]),
    )
    phrasings, answer = answers[int(draft.rng.integers(3))]
    draft.ask(phrasings, answer=answer, kind="text", number=number)


_MAKERS: dict[str, tuple[float, Callable[[_Draft], None]]] = {
    "read": (0.66, _make_read),
    "read_long": (0.12, _make_read_long),
    "count": (0.08, _make_count),
    "compare": (0.07, _make_compare),
    "text": (0.07, _make_text),
}
"""The kind of a sample's first turn: its share, and what makes it."""


def _maybe_count(draft: _Draft, *, digits: str) -> None:
    if draft.rng.random() < 0.25:
        _count(draft, digits=digits)


def _count(draft: _Draft, *, digits: str) -> None:
    if draft.rng.random() < 0.5:
        draft.ask(_COUNT_ALL, answer=str(len(digits)), kind="count")
        return
    # A digit that is there as often as one drawn at random, so that "0" is no safe guess.
    digit = str(draft.rng.integers(10))
    if draft.rng.random() < 0.7:
        digit = digits[int(draft.rng.integers(len(digits)))]
    draft.ask(_COUNT_ONE, answer=str(digits.count(digit)), kind="count", digit=digit)


def _compose(
    draft: _Draft, *, digits: str, num_rows: int = 1, may_be_large: bool = False
) -> np.ndarray:
    """Lay digits out on rows of a canvas, read from left to right and top to bottom.

    Returns:
        [H, W, 1 or 3] uint8: dark ink on light paper.
    """
    rng = draft.rng
    num_columns = -(-len(digits) // num_rows)
    fits_large = may_be_large and num_columns * _LARGE_DIGIT_PX <= _MAX_WIDTH_PX
    digit_px = _LARGE_DIGIT_PX if fits_large and rng.random() < 0.2 else _DIGIT_PX
    # A ragged edge behind the digits, as a scan has.
    edge_y_px, edge_x_px = (int(value) for value in rng.integers(-5, 6, size=2).clip(0))
    height_px = num_rows * digit_px + edge_y_px
    width_px = num_columns * digit_px + edge_x_px
    ink = np.zeros((height_px, width_px), dtype=np.float32)
    for place, digit in enumerate(digits):
        row, column = divmod(place, num_columns)
        jitter_y_px, jitter_x_px = rng.integers(-1, 2, size=2)
        top = row * digit_px + int(jitter_y_px)
        left = column * digit_px + int(jitter_x_px)
        top = min(max(top, 0), height_px - digit_px)
        left = min(max(left, 0), width_px - digit_px)
        window = ink[top : top + digit_px, left : left + digit_px]
        rows = draft.scans.by_digit[int(digit)]
        scan = draft.scans.ink[digit_px][rows[int(rng.integers(len(rows)))]]
        np.maximum(window, _slant(scan, rng=rng), out=window)
    num_channels = 1 if rng.random() < 0.5 else 3
    paper = rng.uniform(225, 255, size=num_channels)
    pen = rng.uniform(0, 50, size=num_channels)
    return np.rint(paper + ink[:, :, None] * (pen - paper)).astype(np.uint8)


def _slant(scan: np.ndarray, *, rng: np.random.Generator) -> np.ndarray:
    """Turn, shear and stretch a scan a little about its centre, as another hand would write it."""
    turn, shear = rng.uniform(-0.12, 0.12, size=2)
    stretch_x, stretch_y = rng.uniform(0.92, 1.12, size=2)
    matrix = np.array([[1, shear - turn], [turn, 1]]) * [stretch_x, stretch_y]
    centre = (len(scan) - 1) / 2
    offset = centre - matrix @ [centre, centre]
    image = Image.fromarray(scan).transform(
        scan.shape[::-1],
        Image.Transform.AFFINE,
        (*matrix[0], offset[0], *matrix[1], offset[1]),
        Image.Resampling.BILINEAR,
    )
    return np.asarray(image)


def _save(pixels: np.ndarray, *, folder: Path, stem: str, rng: np.random.Generator) -> str:
    """Write an image as JPEG or PNG and return its path, relative to the folder."""
    image = Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
    if rng.random() < 0.5:
        path = f"images/{stem}.jpg"
        image.save(folder / path, format="JPEG", quality=_JPEG_QUALITY)
    else:
        path = f"images/{stem}.png"
        image.save(folder / path, format="PNG")
    return path
