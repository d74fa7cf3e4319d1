"""Whether the disk of a run's folder takes what is written: full, over its quota, read-only.

Ranks go on where it does not, and what they log of it would lie on that very disk: the launcher
looks itself.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

_PROBE_BYTES = 4096


def refusal(folder: Path) -> str | None:
    """Write a page and remove it; return what the disk says instead of taking it, if anything."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".room-") as file:
            file.write(bytes(_PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error.strerror or str(error)
    return None
