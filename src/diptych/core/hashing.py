"""Identities: sha256 over canonical JSON and over files; xxh3_128 where only speed matters."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import xxhash

_CHUNK_BYTES = 1 << 20


def canonical_json(value: Any) -> str:
    """Write JSON with sorted keys and no spaces, so that equal values give equal bytes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def sha256_json(value: Any) -> str:
    """Hash a JSON value's canonical text; 64 hexadecimal digits."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def sha256_file(path: Path) -> str:
    """Hash a file's bytes; 64 hexadecimal digits."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def xxh3_bytes(data: bytes | memoryview) -> str:
    """Hash bytes with xxh3_128 (fast, not cryptographic); 32 hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(data)


def xxh3_file(path: Path) -> str:
    """Hash a file's bytes with xxh3_128 (fast, not cryptographic); 32 hexadecimal digits."""
    digest = xxhash.xxh3_128()
    chunk = memoryview(bytearray(_CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(chunk):
            digest.update(chunk[:count])
    return digest.hexdigest()


def sha256_folder(folder: Path, *, exclude: frozenset[str] = frozenset()) -> str:
    """Hash a folder's relative paths and file contents, but for the names in `exclude`."""
    files = {
        path.relative_to(folder).as_posix(): sha256_file(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.relative_to(folder).as_posix() not in exclude
    }
    return sha256_json(files)
