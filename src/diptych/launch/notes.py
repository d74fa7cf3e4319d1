"""What those who start ranks say to whoever follows them: lines of JSON beside the ranks' logs.

`news` is for people as it comes, `why` is the reason of an end. Several processes append, each a
whole line at a time.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal, NamedTuple

_NAME = "notes.jsonl"
Kind = Literal["news", "why"]


class Note(NamedTuple):
    """One thing said."""

    kind: Kind
    text: str


def write_note(logs: Path, kind: Kind, text: str) -> None:
    """Say something."""
    line = json.dumps({"kind": kind, "text": text}) + "\n"
    with (logs / _NAME).open("ab", buffering=0) as file:
        file.write(line.encode())


class NoteTail:
    """Reads what has been said since the last look."""

    def __init__(self, logs: Path) -> None:
        self._path = logs / _NAME
        self._num_read = 0

    def read(self) -> list[Note]:
        """Return what is new."""
        notes = self.read_all()
        new = notes[self._num_read :]
        self._num_read = len(notes)
        return new

    def read_all(self) -> list[Note]:
        """Return all of it; a line that is not whole yet is left out."""
        try:
            lines = self._path.read_text("utf-8").splitlines(keepends=True)
        except FileNotFoundError:
            return []
        values = [json.loads(line) for line in lines if line.endswith("\n")]
        return [Note(value["kind"], value["text"]) for value in values]
