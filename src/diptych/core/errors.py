"""Errors that reach a person, each with what was found, what is allowed and what to do.

DiptychError
├── ConfigError    a parameter is unknown, ill-typed, or asks for what cannot work
├── DataError      raw samples that cannot be used
├── FormatError    a file of ours is damaged, of another version, or of another identity
│   └── VersionError   it was written by another release, and is whole
├── LayoutError    a layout that this machine or model cannot run
├── RunError       ranks failed or were stopped
└── ParityError    a release that does not compute what was trained
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class DiptychError(Exception):
    """Say what was found, what is allowed and what to do next."""

    def __init__(self, found: str, *, allowed: str = "", cure: str = "") -> None:
        self.found = found
        self.allowed = allowed
        self.cure = cure
        super().__init__(" ".join(_sentence(part) for part in (found, allowed, cure) if part))


class ConfigError(DiptychError):
    """A parameter is unknown, ill-typed, or asks for what cannot work."""


class DataError(DiptychError):
    """Raw samples that cannot be used."""


class FormatError(DiptychError):
    """A file of ours is damaged, of another version, or of another identity."""


class VersionError(FormatError):
    """A file of ours that is whole, and of a version that this release does not read."""


class LayoutError(DiptychError):
    """A layout that this machine or this model cannot run."""


class RunError(DiptychError):
    """Ranks failed or were stopped."""


class ParityError(DiptychError):
    """A release that does not compute what was trained."""


def nearest(name: str, *, allowed: Iterable[str]) -> str:
    """Return a hint that names the nearest allowed spelling, or lists what is allowed."""
    options = sorted(allowed)
    close = difflib.get_close_matches(name, options, n=1, cutoff=0.6)
    if close:
        return f"Did you mean '{close[0]}'?"
    return f"Allowed: {', '.join(options)}." if options else ""


def _sentence(text: str) -> str:
    return text if text.endswith((".", "?", "!", ":")) or "\n" in text else f"{text}."
