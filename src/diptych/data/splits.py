"""Decide which samples are held out, so that no image is in both splits.

In: for each sample the hashes of its images, and the split that its source asks for, if any. Out: a
split for each sample. Samples that share an image, directly or through others, stay together.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Claim:
    """What decides a sample's split: `split` where its source fixes it, else its content."""

    image_sha256s: tuple[str, ...]
    content_sha256: str
    split: str | None
    heldout_fraction: float


def assign_splits(claims: Sequence[Claim]) -> list[str]:
    """Choose 'train' or 'heldout' for each sample.

    A sample without a fixed split follows the images it shares with fixed ones ('train' first).
    Otherwise the smallest hash among the connected images (of a text-only sample, its content's
    hash) is hashed again, and as a fraction of all hashes compared with `heldout_fraction`. Without
    hashing again, the smallest of many would be small, and large groups all be held out.
    """
    parents: dict[str, str] = {}
    for claim in claims:
        for image in claim.image_sha256s:
            _join(parents, claim.image_sha256s[0], image)
    fixed: dict[str, str] = {}
    for claim in claims:
        if claim.split and claim.image_sha256s:
            root = _root(parents, claim.image_sha256s[0])
            if fixed.get(root) != "train":
                fixed[root] = claim.split
    splits = []
    for claim in claims:
        if claim.image_sha256s:
            root = _root(parents, claim.image_sha256s[0])
        else:
            root = claim.content_sha256
        drawn = "heldout" if _fraction(root) < claim.heldout_fraction else "train"
        splits.append(claim.split or fixed.get(root) or drawn)
    return splits


def _fraction(root: str) -> float:
    return int.from_bytes(hashlib.sha256(root.encode()).digest()[:6], "big") / 2**48


def _root(parents: dict[str, str], image: str) -> str:
    while parents.setdefault(image, image) != image:
        parents[image] = parents[parents[image]]
        image = parents[image]
    return image


def _join(parents: dict[str, str], one: str, other: str) -> None:
    """Unite two groups under the smaller hash, so that the order of samples does not matter."""
    first, second = sorted((_root(parents, one), _root(parents, other)))
    parents[second] = first
