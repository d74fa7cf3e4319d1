"""The identity of a sample's content: its messages and its images' bytes, not names or places.

In: messages and images' hashes. Out: a sha256. Index and shards use it to notice a changed file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

from diptych.core.hashing import sha256_json
from diptych.core.records import Message


def sha256_bytes(data: bytes) -> str:
    """Hash bytes; 64 hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def dump_messages(messages: Iterable[Message]) -> list[dict[str, str]]:
    """Write messages as a JSON value."""
    return [{"role": message.role, "text": message.text} for message in messages]


def content_sha256(messages: list[dict[str, str]], *, image_sha256s: Sequence[str]) -> str:
    """Hash a sample's messages and its images' hashes, in order."""
    return sha256_json({"messages": messages, "images": list(image_sha256s)})
