"""What a node's result depends on, as hashes, so that unchanged work can be skipped.

In: a node's parameters, the digests of its inputs, and the source files that its function reaches.
Out: a `Fingerprint` per node, kept in `data/.fingerprints/`, and in words why it differs from the
last one. Knows nothing about running nodes.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError
from pydantic_core import to_jsonable_python

from diptych.core.files import write_text
from diptych.core.hashing import sha256_file, sha256_json, xxh3_file
from diptych.core.records import Record

_ALWAYS_HASHED_BYTES = 1 << 20
"""A smaller file is hashed each time; a larger one only if its size or time has changed."""

_READS_SOURCES_OF = {"diptych.core.provenance": "diptych.worker"}
"""Modules whose result depends on the source files of another, which they don't import."""


class Fingerprint(Record):
    """What a node's last result came from, and what it was; every value is a hash."""

    function: str
    parameters: dict[str, str]
    inputs: dict[str, str]
    sources: dict[str, str]
    outputs: dict[str, str] = Field(default_factory=dict)

    def changes(self, last: Fingerprint) -> list[str]:
        """Name what differs from the last fingerprint, outputs aside."""
        changed = [] if self.function == last.function else ["the node's function"]
        for part in ("parameters", "inputs", "sources"):
            now, before = getattr(self, part), getattr(last, part)
            changed += sorted(
                key for key in now.keys() | before.keys() if now.get(key) != before.get(key)
            )
        return changed


class Named(Record):
    """What a source file was found to name."""

    sha256: str
    names: list[str]


class KnownNames(Record):
    """What files name, by path, as this very module found it (`parser` is its hash)."""

    parser: str
    files: dict[str, Named] = Field(default_factory=dict)


class FileHashes:
    """Content hashes of files; those of large files are remembered by path, size and time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._known: dict[str, list[Any]] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            self._known = {}

    def __call__(self, path: Path) -> str:
        """Return the hash of a file's bytes."""
        status = path.stat()
        if status.st_size < _ALWAYS_HASHED_BYTES:
            return xxh3_file(path)
        name, state = str(path.resolve()), [status.st_size, status.st_mtime_ns]
        if self._known.get(name, [])[:2] != state:
            self._known[name] = [*state, xxh3_file(path)]
        return self._known[name][2]

    def save(self) -> None:
        """Remember the hashes for the next run."""
        write_text(self._path, text=json.dumps(self._known, indent=0))


class Sources:
    """The source files of a package as they are now, and which of them a module reaches.

    A module reaches what it imports (also inside functions), what is named as a dotted module in
    one of its strings (`python -m diptych.worker`), the packages around each, and the files in
    their folders that are not Python (templates). Read once, so that a file edited during a long
    run counts as it was when the run began.

    Args:
        root: the package's folder.
        known: where what each file names is remembered for the next time, by the file's hash;
            finding it takes a second or so for all.
    """

    def __init__(self, root: Path, *, known: Path | None = None) -> None:
        self.root = root
        self._path = known
        self._named_by = _read_names(known)
        self._is_saved = True
        self._texts = {
            path.relative_to(root.parent).as_posix(): path.read_bytes()
            for path in sorted(root.rglob("*"))
            if path.is_file() and "__pycache__" not in path.parts
        }
        self._modules = {_module(name): name for name in self._texts if name.endswith(".py")}
        self._data = {name: self._package(name) for name in self._texts if name[-3:] != ".py"}
        self._dotted = re.compile(rf"\b{re.escape(root.name)}(?:\.\w+)+")
        self._hashes: dict[str, str] = {}
        self._reached: dict[str, frozenset[str]] = {}

    def files(self, module: str) -> list[str]:
        """List the files that a module reaches, relative to the folder that holds the package."""
        reached: set[str] = set()
        todo = [module]
        while todo:
            name = todo.pop()
            if name not in reached:
                reached.add(name)
                todo += self._reads(name)
        code = {self._modules[name] for name in reached}
        folders = {name.rpartition("/")[0] for name in code}
        return sorted(code | {name for name, owner in self._data.items() if owner in folders})

    def hashes(self, module: str) -> dict[str, str]:
        """Map the files that a module reaches to their sha256.

        A module outside the package counts with its own file only.
        """
        if module not in self._modules:
            return _outside(module)
        return {name: self._hash(name) for name in self.files(module)}

    def save(self) -> None:
        """Remember what the files name, for the next run."""
        if self._path is not None and not self._is_saved:
            write_text(self._path, text=self._named_by.model_dump_json(indent=0))
            self._is_saved = True

    def _package(self, name: str) -> str:
        folder = name.rpartition("/")[0]
        while folder and f"{folder}/__init__.py" not in self._texts:
            folder = folder.rpartition("/")[0]
        return folder

    def _hash(self, name: str) -> str:
        if name not in self._hashes:
            self._hashes[name] = hashlib.sha256(self._texts[name]).hexdigest()
        return self._hashes[name]

    def _reads(self, module: str) -> frozenset[str]:
        if module not in self._reached:
            self._reached[module] = frozenset(self._with_packages(self._named(module)))
        return self._reached[module]

    def _named(self, module: str) -> list[str]:
        path = self._modules[module]
        known = self._named_by.files.get(path)
        if known is None or known.sha256 != self._hash(path):
            names = sorted(set(self._parse(module, path=path)))
            known = self._named_by.files[path] = Named(sha256=self._hash(path), names=names)
            self._is_saved = False
        return [module, _READS_SOURCES_OF.get(module, ""), *known.names]

    def _parse(self, module: str, *, path: str) -> Iterator[str]:
        for node in ast.walk(ast.parse(self._texts[path])):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield from _imported(node, module=module, is_package=path.endswith("/__init__.py"))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield from self._dotted.findall(node.value)

    def _with_packages(self, names: Iterable[str]) -> Iterator[str]:
        for name in names:
            parts = name.split(".")
            for end in range(1, len(parts) + 1):
                prefix = ".".join(parts[:end])
                if prefix in self._modules:
                    yield prefix


def hash_parameters(name: str, *, value: Any) -> dict[str, str]:
    """Hash a parameter leaf by leaf: dotted name to hash."""
    plain = to_jsonable_python(value)
    if isinstance(plain, dict) and plain:
        return {
            key: hashed
            for part in plain
            for key, hashed in hash_parameters(f"{name}.{part}", value=plain[part]).items()
        }
    return {name: sha256_json(plain)}


def read_fingerprint(path: Path) -> Fingerprint | None:
    """Read a node's last fingerprint; None where there is none that can be used."""
    try:
        return Fingerprint.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, ValidationError):
        return None


def _read_names(path: Path | None) -> KnownNames:
    """Read what files are known to name; nothing where that cannot be used."""
    nothing = KnownNames(parser=sha256_file(Path(__file__)))
    if path is None:
        return nothing
    try:
        known = KnownNames.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, ValidationError):
        return nothing
    return known if known.parser == nothing.parser else nothing


def _module(name: str) -> str:
    return name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _imported(node: ast.ImportFrom, *, module: str, is_package: bool) -> list[str]:
    origin = node.module or ""
    if node.level:
        # `from . import x` counts from the module's package, `from ..` from the one above it.
        parts = module.split(".")
        parts = parts[: len(parts) - node.level + is_package]
        origin = ".".join([*parts, *([node.module] if node.module else [])])
    return [origin, *(f"{origin}.{alias.name}" for alias in node.names)]


def _outside(module: str) -> dict[str, str]:
    path = getattr(sys.modules.get(module), "__file__", None)
    return {module: sha256_file(Path(path)) if path else ""}
