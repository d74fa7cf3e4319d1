"""Decide which samples are kept, and which are held out, so that no image is in both splits.

In: for each sample the hashes of its key, content and images, and the split that its source asks
for, if any. Out: a split or a refusal for each. Everything is a column of numbers: the memory is
some tens of bytes per sample and per image, and there is no Python object for any of them. Hashes
are 128 bits, [N, 2] uint64, the high half first; two that are equal are taken for the same thing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

TRAIN, HELDOUT, OPEN = 0, 1, 2
SPLITS = ("train", "heldout")

KEPT, DUPLICATE_ID, DUPLICATE_CONTENT, CONTENT_LEAK, IMAGE_LEAK = range(5)
VERDICTS = {
    DUPLICATE_ID: "duplicate_id",
    DUPLICATE_CONTENT: "duplicate_content",
    CONTENT_LEAK: "leaks_into_train",
    IMAGE_LEAK: "image_leaks_into_train",
}
"""The reason code of each verdict but `KEPT`."""


@dataclass(frozen=True, eq=False)
class Claims:
    """What decides on N samples with M images together.

    Attributes:
        keys: [N, 2] uint64.
        contents: [N, 2] uint64.
        images: [M, 2] uint64, sample after sample.
        image_starts: [N + 1] int64; sample i has images[image_starts[i] : image_starts[i + 1]].
        splits: [N] int8, `TRAIN`, `HELDOUT` or `OPEN`.
        heldout_fractions: [N] float32, of what is open.
    """

    keys: np.ndarray
    contents: np.ndarray
    images: np.ndarray
    image_starts: np.ndarray
    splits: np.ndarray
    heldout_fractions: np.ndarray


@dataclass(frozen=True, eq=False)
class Decisions:
    """What became of N samples.

    Attributes:
        verdicts: [N] int8, `KEPT` or why not.
        splits: [N] int8, `TRAIN` or `HELDOUT`.
        twins: [N] int64; of a refused sample the other one that is the reason, else -1.
    """

    verdicts: np.ndarray
    splits: np.ndarray
    twins: np.ndarray


def decide(
    claims: Claims,
    *,
    duplicates: Literal["drop", "keep"] = "drop",
    leakage: Literal["images", "content"] = "images",
) -> Decisions:
    """Judge all samples.

    Of several with one key the first stays. Then splits are drawn, held-out samples that are known
    from training are leaks, and of several in one split with the same content the first stays.

    Args:
        claims: The samples, in order.
        duplicates: Whether samples of equal content are kept.
        leakage: What a held-out sample may not share with a training sample: any image, or its
            whole content.
    """
    found = Decisions(
        verdicts=np.zeros(len(claims.keys), dtype=np.int8),
        splits=np.empty(len(claims.keys), dtype=np.int8),
        twins=np.full(len(claims.keys), -1, dtype=np.int64),
    )
    # Each step frees its columns before the next makes its own.
    _refuse_repeated(claims.keys, found=found, verdict=DUPLICATE_ID)
    found.splits[:] = assign_splits(claims, counted=found.verdicts == KEPT)
    _refuse_contents(claims, found=found)
    if leakage == "images":
        _refuse_images(claims, found=found)
    if duplicates == "drop":
        # Equal content in both splits is a leak by now, so that content alone tells twins.
        _refuse_repeated(claims.contents, found=found, verdict=DUPLICATE_CONTENT)
    return found


def _refuse(found: Decisions, *, who: np.ndarray, verdict: int, because_of: np.ndarray) -> None:
    """Refuse some of the samples that are still kept; [N] bool and [N] int64."""
    who &= found.verdicts == KEPT
    found.verdicts[who] = verdict
    found.twins[who] = because_of[who]


def _refuse_repeated(hashes: np.ndarray, *, found: Decisions, verdict: int) -> None:
    """Keep only the first of the kept samples with one hash."""
    kept = np.flatnonzero(found.verdicts == KEPT)
    first = kept[first_of(hashes[kept])]
    repeated = first != kept
    found.verdicts[kept[repeated]] = verdict
    found.twins[kept[repeated]] = first[repeated]


def _refuse_contents(claims: Claims, *, found: Decisions) -> None:
    """Refuse held-out samples whose whole content a training sample has."""
    in_train = np.flatnonzero((found.splits == TRAIN) & (found.verdicts == KEPT))
    ids = first_of(claims.contents)
    trained = _first_trained(ids, who=in_train, samples=in_train)[ids]
    heldout = (found.splits == HELDOUT) & (trained >= 0)
    _refuse(found, who=heldout, verdict=CONTENT_LEAK, because_of=trained)


def _refuse_images(claims: Claims, *, found: Decisions) -> None:
    """Refuse held-out samples of which a training sample has an image."""
    counts = np.diff(claims.image_starts)
    owners = np.repeat(np.arange(len(counts)), counts)
    ids = first_of(claims.images)
    in_train = np.flatnonzero(((found.splits == TRAIN) & (found.verdicts == KEPT))[owners])
    trained = _first_trained(ids, who=in_train, samples=owners[in_train])[ids]
    images = np.flatnonzero(trained >= 0)[::-1]
    shared = np.full(len(counts), -1, dtype=np.int64)
    shared[owners[images]] = trained[images]
    heldout = (found.splits == HELDOUT) & (shared >= 0)
    _refuse(found, who=heldout, verdict=IMAGE_LEAK, because_of=shared)


def assign_splits(claims: Claims, *, counted: np.ndarray) -> np.ndarray:
    """Choose a split for each sample.

    A sample without a fixed split follows the images that it shares with fixed ones (`TRAIN`
    first). Otherwise it is drawn: samples that share images, directly or through others, have one
    root, the smallest hash among their images (of a text-only sample, its content's hash); the low
    half of the root, as a fraction of all, is compared with `heldout_fractions`. The high half,
    by which it is the smallest, would be small for large groups and hold them all out.

    Args:
        claims: The samples.
        counted: [N] bool; the others join no group and fix no split.

    Returns:
        [N] int8, `TRAIN` or `HELDOUT`.
    """
    groups, roots = _group(claims, counted=counted)
    drawn = roots / np.float64(2**64) < claims.heldout_fractions
    splits = np.where(drawn, HELDOUT, TRAIN).astype(np.int8)
    fixed = np.full(groups.max(initial=-1) + 2, OPEN, dtype=np.int8)
    with_image = counted & (groups >= 0)
    for split in (HELDOUT, TRAIN):  # the last one stays
        fixed[groups[with_image & (claims.splits == split)]] = split
    follows = np.where(groups >= 0, fixed[groups], OPEN)
    splits = np.where(follows == OPEN, splits, follows)
    return np.where(claims.splits == OPEN, splits, claims.splits).astype(np.int8)


def first_of(hashes: np.ndarray) -> np.ndarray:
    """Return for each hash the place of the first one equal to it.

    Args:
        hashes: [N, 2] uint64.

    Returns:
        [N] int64.
    """
    order, starts = _sort(hashes)
    first = np.empty(len(order), dtype=np.int64)
    # The sort is stable: the first of equal ones is the first in order.
    first[order] = order[starts][np.cumsum(starts) - 1]
    return first


def _sort(hashes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the ascending order, [N] int64, and where in it another hash begins, [N] bool."""
    order = np.argsort(hashes[:, 0], kind="stable")
    high, low = hashes[order].T
    # Different hashes hardly ever share a half, so that one half mostly gives the whole order.
    if ((high[1:] == high[:-1]) & (low[1:] < low[:-1])).any():
        order = np.lexsort((hashes[:, 1], hashes[:, 0]))
        high, low = hashes[order].T
    starts = np.ones(len(order), dtype=bool)
    starts[1:] = (high[1:] != high[:-1]) | (low[1:] != low[:-1])
    return order, starts


def _group(claims: Claims, *, counted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return for each sample its group, [N] int64 (-1: no image), and root's low half, [N]."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    counts = np.diff(claims.image_starts)
    roots = claims.contents[:, 1].copy()
    groups = np.full(len(counts), -1, dtype=np.int64)
    with_image = counts > 0
    if not with_image.any():
        return groups, roots
    order, starts = _sort(claims.images)
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.cumsum(starts) - 1
    ranked = claims.images[order[starts], 1]
    del order, starts
    firsts = claims.image_starts[:-1]
    joined = counted & (counts > 1)
    edges = (np.repeat(rank[firsts[joined]], counts[joined]), rank[np.repeat(joined, counts)])
    ones = np.ones(len(edges[0]), dtype=np.int8)
    graph = coo_array((ones, edges), shape=(len(ranked), len(ranked)))
    _, labels = connected_components(graph, directed=False)
    # Images are ranked by hash, so a label's first image is the smallest of its group.
    smallest = np.full(labels.max() + 1, len(labels), dtype=np.int64)
    np.minimum.at(smallest, labels, np.arange(len(labels)))
    groups[with_image] = labels[rank[firsts[with_image]]]
    roots[with_image] = ranked[smallest[groups[with_image]]]
    return groups, roots


def _first_trained(ids: np.ndarray, *, who: np.ndarray, samples: np.ndarray) -> np.ndarray:
    """Return for each id the first training sample that has it, else -1; [number of ids] int64."""
    found = np.full(len(ids), -1, dtype=np.int64)
    # Written backwards, so that the first sample stays.
    found[ids[who[::-1]]] = samples[::-1]
    return found
