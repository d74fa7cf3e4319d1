"""Which code made it."""

from __future__ import annotations

from diptych.core.records.base import Record


class Provenance(Record):
    """Which code and packages made it."""

    git_commit: str | None
    git_dirty: bool | None
    source_sha256: str
    versions: dict[str, str]
