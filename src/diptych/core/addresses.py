"""Addresses as they may be shown: without who asks, and without what is asked beside the path."""

from __future__ import annotations

import re

_SECRETS = re.compile(r"(?<=://)[^/@\s]*@|(?<=\?)\S+")


def without_secrets(text: str) -> str:
    """Cut users, passwords and queries out of the addresses in a text."""
    return _SECRETS.sub("", text) if "://" in text else text
