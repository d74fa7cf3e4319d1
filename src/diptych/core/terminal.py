"""Text that others wrote, made harmless for a terminal: escape codes out, control characters shown.

A line of a log can hold what moves the cursor, renames the window or answers for the user.
"""

from __future__ import annotations

import re

_ESCAPES = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # colours, cursor
    r"|\x1b[\]PX^_].*?(?:\x07|\x1b\\|$)"  # titles, links, device control: up to their end
    r"|\x1b[ -/]*[0-~]?"
)
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def plain(line: str) -> str:
    """Return a line without escape codes, each other control character as `?`.

    Of what a progress bar wrote over and over, the last is kept.
    """
    last = line.rstrip("\r\n").rpartition("\r")[2]
    return _CONTROLS.sub("?", _ESCAPES.sub("", last))
