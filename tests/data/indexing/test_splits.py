"""Verdicts and splits against a plain reading of the rules, with sets and dictionaries."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.data.indexing.splits import (
    CONTENT_LEAK,
    DUPLICATE_CONTENT,
    DUPLICATE_ID,
    HELDOUT,
    IMAGE_LEAK,
    KEPT,
    OPEN,
    TRAIN,
    Claims,
    assign_splits,
    decide,
    first_of,
)


def claim(samples: list[tuple], *, fraction: float = 0.5) -> Claims:
    """Make claims of (key, content, images, split); a number stands for the hash it spreads to."""
    counts = [len(images) for _, _, images, _ in samples]
    return Claims(
        keys=_hashes([key for key, _, _, _ in samples]),
        contents=_hashes([content for _, content, _, _ in samples]),
        images=_hashes([image for _, _, images, _ in samples for image in images]),
        image_starts=np.cumsum([0, *counts]),
        splits=np.array([split for _, _, _, split in samples], dtype=np.int8),
        heldout_fractions=np.full(len(samples), fraction, dtype=np.float32),
    )


def _hashes(numbers: list[int]) -> np.ndarray:
    """Spread small numbers: few high halves, so that the low ones matter."""
    high = np.array([number % 3 for number in numbers], dtype=np.uint64)
    low = np.array([number * 0x9E3779B97F4A7C15 % 2**64 for number in numbers], dtype=np.uint64)
    return np.stack([high, low], axis=1)


@settings(deadline=None)
@given(st.lists(st.integers(0, 20), max_size=40))
def test_the_first_of_equal_hashes(numbers: list[int]) -> None:
    found = first_of(_hashes(numbers))
    assert found.tolist() == [numbers.index(number) for number in numbers]


SAMPLES = st.lists(
    st.tuples(
        st.integers(0, 30),
        st.integers(100, 108),
        st.lists(st.integers(200, 212), max_size=3),
        st.sampled_from([TRAIN, HELDOUT, OPEN]),
    ),
    max_size=24,
)


@settings(deadline=None)
@given(SAMPLES, st.sampled_from(["drop", "keep"]), st.sampled_from(["images", "content"]))
def test_verdicts_are_those_of_the_rules(samples, duplicates, leakage) -> None:
    found = decide(claim(samples), duplicates=duplicates, leakage=leakage)
    keys = [key for key, _, _, _ in samples]
    alive = [number for number, key in enumerate(keys) if keys.index(key) == number]
    assert np.flatnonzero(found.verdicts == DUPLICATE_ID).tolist() == [
        number for number in range(len(keys)) if number not in alive
    ]
    train = [n for n in alive if found.splits[n] == TRAIN]
    contents = {samples[n][1] for n in train}
    images = {image for n in train for image in samples[n][2]}
    seen: set[tuple[int, int]] = set()
    for n in alive:
        _, content, own, _ = samples[n]
        is_heldout = found.splits[n] == HELDOUT
        if is_heldout and content in contents:
            expected = CONTENT_LEAK
        elif is_heldout and leakage == "images" and images & set(own):
            expected = IMAGE_LEAK
        elif duplicates == "drop" and (content, found.splits[n]) in seen:
            expected = DUPLICATE_CONTENT
        else:
            expected = KEPT
            seen.add((content, int(found.splits[n])))
        assert found.verdicts[n] == expected
        twin = found.twins[n]
        assert (twin >= 0) == (expected != KEPT)
        if expected == IMAGE_LEAK:
            assert twin in train
            assert set(own) & set(samples[twin][2])
        elif expected != KEPT:
            assert samples[twin][1] == content


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.lists(st.integers(200, 211), max_size=3), st.integers(100, 120))),
    st.randoms(use_true_random=False),
)
def test_splits_keep_images_together_in_any_order(drawn, random) -> None:
    samples = [(number, content, images, OPEN) for number, (images, content) in enumerate(drawn)]
    everyone = np.ones(len(samples), dtype=bool)
    splits = assign_splits(claim(samples), counted=everyone)
    for (_, _, images, _), split in zip(samples, splits, strict=True):
        for (_, _, others, _), other_split in zip(samples, splits, strict=True):
            if set(images) & set(others):
                assert split == other_split
    order = list(range(len(samples)))
    random.shuffle(order)
    again = assign_splits(claim([samples[place] for place in order]), counted=everyone)
    assert again.tolist() == [splits[place] for place in order]


def test_an_open_split_follows_a_fixed_one() -> None:
    samples = [
        (0, 101, [201], OPEN),
        (1, 102, [201], HELDOUT),
        (2, 103, [202], OPEN),
        (3, 104, [202], TRAIN),
        (4, 105, [202, 201], HELDOUT),
    ]
    everyone = np.ones(5, dtype=bool)
    # The last one joins both groups; what is fixed stays, and the open ones go to training.
    splits = assign_splits(claim(samples), counted=everyone)
    assert splits.tolist() == [TRAIN, HELDOUT, TRAIN, TRAIN, HELDOUT]
    splits = assign_splits(claim(samples[:4]), counted=everyone[:4])
    assert splits.tolist() == [HELDOUT, HELDOUT, TRAIN, TRAIN]
    # A sample that is refused already joins nothing.
    splits = assign_splits(claim(samples), counted=np.array([1, 1, 1, 1, 0], dtype=bool))
    assert splits[:4].tolist() == [HELDOUT, HELDOUT, TRAIN, TRAIN]


@pytest.mark.parametrize("group", [1, 50])
def test_the_held_out_share_does_not_depend_on_the_groups_size(group: int) -> None:
    rng = np.random.default_rng(0)
    num_images = 2_000 * group
    images = rng.integers(0, 2**64, size=(num_images, 2), dtype=np.uint64)
    num_samples = num_images // group
    claims = Claims(
        keys=images[:num_samples],
        contents=images[:num_samples],
        images=images,
        image_starts=np.arange(0, num_images + 1, group),
        splits=np.full(num_samples, OPEN, dtype=np.int8),
        heldout_fractions=np.full(num_samples, 0.3, dtype=np.float32),
    )
    share = (assign_splits(claims, counted=np.ones(num_samples, dtype=bool)) == HELDOUT).mean()
    # Three standard deviations of a draw of 2,000.
    assert abs(share - 0.3) < 3 * (0.3 * 0.7 / 2_000) ** 0.5


def test_no_sample_at_all() -> None:
    assert len(decide(claim([])).verdicts) == 0
