"""The identity of a sample's content: its messages and its images' bytes, not names or places.

In: messages and images' hashes. Out: an xxh3_128. Index and shards use it to notice a changed file.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from json.encoder import encode_basestring

from diptych.core.hashing import xxh3_bytes
from diptych.core.records import Message


def dump_messages(messages: Iterable[Message]) -> list[dict[str, str]]:
    """Write messages as a JSON value."""
    return [{"role": message.role, "text": message.text} for message in messages]


def turns_json(turns: Iterable[tuple[str, str]]) -> str:
    """Write roles and texts as `canonical_json` would dumped messages, but faster.

    Roles are plain words that need no escape.
    """
    found = [f'{{"role":"{role}","text":{encode_basestring(text)}}}' for role, text in turns]
    return f"[{','.join(found)}]"


def content_hash(messages: Iterable[dict[str, str]], *, image_hashes: Sequence[str]) -> str:
    """Hash a sample's dumped messages and its images' hashes; 32 hexadecimal digits."""
    turns = [(message["role"], message["text"]) for message in messages]
    return hash_json(turns_json(turns), image_hashes=image_hashes)


def hash_json(messages: str, *, image_hashes: Sequence[str]) -> str:
    """Hash what `turns_json` wrote and the images' hashes, in order; 32 hexadecimal digits."""
    return xxh3_bytes(f"{messages}{' '.join(image_hashes)}".encode())
