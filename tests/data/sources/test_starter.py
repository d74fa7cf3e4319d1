"""The starter data: what the design promises of them, checked on the files themselves."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from diptych.core.hashing import sha256_folder
from diptych.data.sources.starter import _split_scans, build_starter, is_starter


@pytest.fixture(scope="module")
def starter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_starter(tmp_path_factory.mktemp("raw") / "starter", num_train=900, num_heldout=150)


@pytest.fixture(scope="module")
def rows(starter: Path) -> dict[str, list[dict]]:
    return {
        split: json.loads((starter / f"{split}.json").read_text()) for split in ("train", "heldout")
    }


def _paths(row: dict) -> list[str]:
    image = row.get("image", [])
    return [image] if isinstance(image, str) else image


def test_the_same_seed_gives_the_same_bytes_and_another_does_not(tmp_path: Path) -> None:
    first, second, other = (
        build_starter(tmp_path / name, num_train=40, num_heldout=10, seed=seed)
        for name, seed in (("first", 3), ("second", 3), ("other", 4))
    )
    assert sha256_folder(first) == sha256_folder(second)
    assert sha256_folder(first) != sha256_folder(other)


def test_a_build_replaces_what_was_there_and_leaves_no_temporary_files(tmp_path: Path) -> None:
    folder = tmp_path / "starter"
    (folder / "images").mkdir(parents=True)
    (folder / "images" / "stale.png").write_bytes(b"")
    assert not is_starter(folder)
    build_starter(folder, num_train=3, num_heldout=2)
    assert is_starter(folder)
    assert not (folder / "images" / "stale.png").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["starter"]


def test_counts_and_conversations(rows: dict[str, list[dict]]) -> None:
    assert {split: len(found) for split, found in rows.items()} == {"train": 900, "heldout": 150}
    every = rows["train"] + rows["heldout"]
    assert len({row["id"] for row in every}) == len(every)
    for row in every:
        turns = row["conversations"]
        assert [turn["from"] for turn in turns] == ["human", "gpt"] * len(row["kinds"])
        text = "".join(turn["value"] for turn in turns[::2])
        assert text.count("<image>") == len(_paths(row))


def test_kinds_have_their_shares(rows: dict[str, list[dict]]) -> None:
    firsts = Counter(row["kinds"][0] for row in rows["train"])
    assert set(firsts) == {"read", "read_long", "count", "compare", "text"}
    assert 0.6 < firsts["read"] / 900 < 0.72
    assert any(len(_paths(row)) == 2 for row in rows["train"])
    assert any(not _paths(row) for row in rows["train"])
    assert 0.1 < sum(len(row["kinds"]) > 1 for row in rows["train"]) / 900 < 0.35


def test_numbers_have_1_to_4_digits_alike_and_cannot_be_guessed(
    rows: dict[str, list[dict]],
) -> None:
    answers = [
        row["conversations"][1]["value"]
        for split in rows.values()
        for row in split
        if row["kinds"][0] == "read"
    ]
    lengths = Counter(len(answer) for answer in answers)
    assert set(lengths) == {1, 2, 3, 4}
    assert all(0.19 < count / len(answers) < 0.31 for count in lengths.values())
    # The best answer without looking, even for one who knows how many digits there are.
    for length in lengths:
        alike = Counter(answer for answer in answers if len(answer) == length)
        assert alike.most_common(1)[0][1] / len(answers) < 0.06


def test_counts_agree_with_what_was_read(rows: dict[str, list[dict]]) -> None:
    checked = 0
    for row in rows["train"]:
        if row["kinds"] in (["read", "count"], ["read_long", "count"]):
            number, question, answer = (turn["value"] for turn in row["conversations"][1:])
            asked = [character for character in question if character.isdigit()]
            assert int(answer) == (number.count(asked[0]) if asked else len(number))
            checked += 1
    assert checked > 50


def test_sizes_formats_and_aspects_vary(starter: Path, rows: dict[str, list[dict]]) -> None:
    sizes, formats, modes = set(), Counter(), Counter()
    for row in rows["train"]:
        for path in _paths(row):
            with Image.open(starter / path) as image:
                sizes.add(image.size)
                formats[image.format] += 1
                modes[image.mode] += 1
    assert len(sizes) >= 12
    assert max(width for width, _ in sizes) <= 176
    assert max(height for _, height in sizes) <= 112
    assert min(width / height for width, height in sizes) < 0.8
    assert max(width / height for width, height in sizes) > 4
    assert any(width % 16 and height % 16 for width, height in sizes)
    assert set(formats) == {"JPEG", "PNG"}
    assert set(modes) == {"L", "RGB"}
    assert min(*formats.values(), *modes.values()) > 100


def test_no_scan_is_in_both_splits() -> None:
    train, heldout = _split_scans(0)
    parts = [scans.ink[min(scans.ink)] for scans in (train, heldout)]
    assert [len(part) for part in parts] == [1597, 200]
    # Together they are all of scikit-learn's scans, each once: compare total ink, scan by scan.
    flat, labels = load_digits(return_X_y=True)
    assert sum(map(len, train.by_digit)) + sum(map(len, heldout.by_digit)) == len(flat)
    for digit in range(10):
        count = len(train.by_digit[digit]) + len(heldout.by_digit[digit])
        assert count == int((labels == digit).sum())
    seen = {part.tobytes() for part in parts[0]}
    shared = sum(part.tobytes() in seen for part in parts[1])
    distinct = len({scan.tobytes() for scan in flat})
    assert shared <= len(flat) - distinct


def test_text_questions_differ_between_the_splits(rows: dict[str, list[dict]]) -> None:
    questions = {
        split: {row["conversations"][0]["value"] for row in found if row["kinds"] == ["text"]}
        for split, found in rows.items()
    }
    assert questions["train"]
    assert questions["heldout"]
    assert not questions["train"] & questions["heldout"]


def test_images_show_what_the_answers_say(starter: Path, rows: dict[str, list[dict]]) -> None:
    """Find the scan nearest to any window of a one-digit image: its label is the answer."""
    flat, labels = load_digits(return_X_y=True)
    norms = (flat**2).sum(axis=1)
    sides = sorted(_split_scans(0)[0].ink)
    single = [row for row in rows["train"] if row["kinds"][0] == "read"]
    single = [row for row in single if len(row["conversations"][1]["value"]) == 1][:12]
    right = 0
    for row in single:
        with Image.open(starter / row["image"]) as image:
            grey = np.asarray(image.convert("L"), dtype=np.float64)
        ink = (grey.max() - grey) / (grey.max() - grey.min()) * 16
        best = (np.inf, -1)
        for side in sides:
            for top in range(ink.shape[0] - side + 1):
                for left in range(ink.shape[1] - side + 1):
                    window = Image.fromarray(ink[top : top + side, left : left + side])
                    small = np.asarray(window.resize((8, 8), Image.Resampling.BOX)).reshape(-1)
                    distances = norms - 2 * flat @ small + small @ small
                    nearest = int(distances.argmin())
                    best = min(best, (distances[nearest], int(labels[nearest])))
        right += best[1] == int(row["conversations"][1]["value"])
    assert len(single) == 12
    assert right >= 11
