"""The release folder as its writer, its scorer and its readers know it: file names and identity.

Weights, config and processor make the identity. The model card and the checksums do not: the card
is filled later with the scores, the checksums repeat the identity file by file.
"""

from __future__ import annotations

from pathlib import Path

from diptych.core.files import write_text
from diptych.core.hashing import sha256_file, sha256_json

CARD = "README.md"
CHECKSUMS = "checksums.json"
SCORES = "scores.json"
ADAPTER_FOLDER = "adapter"
UNHASHED = frozenset({CARD, CHECKSUMS, SCORES})

SCORES_BEGIN = "<!-- scores -->"
SCORES_END = "<!-- /scores -->"
NOT_SCORED = "Not scored yet."


def release_checksums(folder: Path) -> dict[str, str]:
    """Hash every file of a release that is part of its identity; {relative path: sha256}."""
    paths = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*"))}
    return {
        name: sha256_file(path)
        for name, path in paths.items()
        if path.is_file() and name not in UNHASHED
    }


def release_sha256(folder: Path) -> str:
    """Name a release by its weights, config and processor; 64 hexadecimal digits."""
    return sha256_json(release_checksums(folder))


def read_score_section(card: str) -> str | None:
    """Return the text of a model card's score section, None where the card has no such section."""
    before, begin, rest = card.partition(SCORES_BEGIN)
    section, end, _ = rest.partition(SCORES_END)
    return section.strip() if before and begin and end else None


def fill_score_section(folder: Path, *, text: str) -> None:
    """Replace the score section of a release's model card; a card without one is left alone."""
    path = folder / CARD
    card = path.read_text(encoding="utf-8") if path.is_file() else ""
    if read_score_section(card) is None:
        return
    before, _, rest = card.partition(SCORES_BEGIN)
    after = rest.partition(SCORES_END)[2]
    write_text(path, text=f"{before}{SCORES_BEGIN}\n\n{text.strip()}\n\n{SCORES_END}{after}")
