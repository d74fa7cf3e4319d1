"""Read WebDataset tars: members with one key are one sample, wherever in the tar they stand.

In: one tar. Out: its samples in the order of their first members, and refusals. A *key* is a
member's folder and its base name up to the first dot; the rest is its *field*, in lower case
(`cats/001.0.JPG`: key `cats/001`, field `0.jpg`). Nothing is unpacked; what the members of a key
say together is the business of `recipe.py`.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from diptych.core.records import RawPart, RawSource
from diptych.data.reasons import Refused
from diptych.data.sources.members import Member, walk_members
from diptych.data.sources.recipe import Recipe
from diptych.data.sources.row import RawRow, Refusal, part_store, refuse

_EXECUTABLE = frozenset({"pkl", "pickle", "p", "dill", "cloudpickle", "joblib", "marshal"})
_EXECUTABLE |= {"pth", "pt", "pyd", "bin", "ckpt", "ten", "npy", "npz", "h5"}
_EXECUTABLE |= {"py", "pyc", "so", "dll", "exe", "sh"}
"""Members in these formats are refused by name: some readers run what is in them."""
_WIDTH = 1 + len(Member._fields)
_MAX_KEPT_BYTES = 64 << 20
"""Of texts that stand between headers: they are read with them, and not once more."""
_LEFT_OUT = {
    "executable_member": "are never loaded, because the format can run code",
    "unused_member": "belong to no part of a sample",
}
"""Why members of a whole format are left out; they make one row of the quarantine together."""


def read_tar(source: RawSource, part: RawPart) -> Iterator[RawRow | Refusal]:
    """Read a tar's samples.

    Args:
        source: Where the tar is; `columns` and `prompt` as `Recipe` says.
        part: The tar.

    Yields:
        Rows, labelled with the tar's name and the key. A damaged tar's samples before the damage,
        then a refusal.

    Raises:
        MissingFile, DataError: As `Store.open`.
    """
    sorter = _Sorter(Recipe(source.columns, prompt=source.prompt), part=part)
    try:
        with _opened(source, part) as file:
            sorter.read(file)
            yield from sorter.rows(file)
    except OSError as error:
        detail = f"It cannot be read: {error.strerror}"
        yield refuse(part.path, reason="damaged_part", value=part.path, detail=detail)


@contextmanager
def _opened(source: RawSource, part: RawPart) -> Iterator[int]:
    """Yield a file descriptor of the tar, or of a copy of a remote one that nobody else sees."""
    store = part_store(source)
    local = store.local(part.path)
    if local is not None:
        file = os.open(local, os.O_RDONLY)
        try:
            yield file
        finally:
            os.close(file)
        return
    with tempfile.TemporaryFile() as copy:
        with store.open(part.path) as remote:
            shutil.copyfileobj(remote, copy, length=1 << 20)
        copy.flush()
        yield copy.fileno()


class _Sorter:
    """Sorts a tar's members into samples, members that no sample takes, and unsafe ones."""

    def __init__(self, recipe: Recipe, *, part: RawPart) -> None:
        self._recipe = recipe
        self._part = part
        # By key: a field, its member's values, the next field, and so on. Python's collector of
        # garbage goes through objects that hold others again and again, but not through such ones.
        self._groups: dict[str, tuple[Any, ...]] = {}
        self._twice: dict[str, str] = {}  # by key, a field that several members have
        self._left_out: dict[tuple[str, str], list[str]] = {}
        self._refusals: list[Refusal] = []
        self._reasons: dict[str, str | None] = {}  # by field, None: a sample takes it

    def read(self, file: int) -> None:
        """Sort the members of an open tar, up to where it is damaged if it is."""
        empty = True
        try:
            for member in walk_members(file, max_kept_bytes=_MAX_KEPT_BYTES):
                empty = False
                self._add(member)
        except Refused as error:
            self._refuse(self._part.path, error.reason, error.value, error.detail)
            return
        if empty:
            self._refuse(self._part.path, "empty_part", self._part.path, "The tar holds no file")

    def rows(self, file: int) -> Iterator[RawRow | Refusal]:
        """Yield the samples, then what is refused."""
        stem = self._part.path.removesuffix(".tar")
        path = self._part.path
        for key, cells in self._groups.items():
            label = f"{stem}/{key}"
            try:
                if key in self._twice:
                    raise _repeated(key, extension=self._twice[key])
                members = {
                    cells[start]: Member._make(cells[start + 1 : start + _WIDTH])
                    for start in range(0, len(cells), _WIDTH)
                }
                value, blobs = self._recipe.make(members, file=file, path=path)
            except Refused as error:
                yield Refusal(label, error.reason, error.value, error.detail)
            else:
                yield RawRow(label, value, blobs)
        for (reason, suffix), names in self._left_out.items():
            detail = f"{len(names):,} members '.{suffix}' {_LEFT_OUT[reason]}"
            yield Refusal(f"{self._part.path}/*.{suffix}", reason, names[0], detail)
        yield from self._refusals

    def _add(self, member: Member) -> None:
        name = member.name
        if name[:2] == "./":
            name = name[2:]
        if member.unfollowed or name[:1] == "/" or ".." in name or "\0" in name:
            problem = member.unfollowed or _find_danger(name)
        else:
            problem = None
        if problem is not None:
            detail = f"It is {problem}; such members are never followed"
            self._refuse(f"{self._part.path}/{name}", "unsafe_member", name, detail)
            return
        folder, slash, base = name.rpartition("/")
        stem, _, extension = base.partition(".")
        if not stem or not extension or stem.startswith("__"):
            detail = "Its name has no key and field, as 'key.jpg' has"
            self._refuse(f"{self._part.path}/{name}", "unused_member", name, detail)
            return
        extension = extension.lower()
        reason = self._reasons.get(extension, "")
        if reason == "":
            reason = self._reasons[extension] = self._why_not(extension)
        if reason is not None:
            suffix = extension.rpartition(".")[2]
            self._left_out.setdefault((reason, suffix), []).append(name)
            return
        key = folder + slash + stem
        cells = self._groups.get(key, ())
        if extension in cells[::_WIDTH]:
            self._twice[key] = extension
        self._groups[key] = (*cells, extension, *member)

    def _why_not(self, extension: str) -> str | None:
        if extension.rpartition(".")[2] in _EXECUTABLE:
            return "executable_member"
        return None if self._recipe.takes(extension) else "unused_member"

    def _refuse(self, label: str, reason: str, value: str, detail: str) -> None:
        self._refusals.append(Refusal(label, reason, value, detail))


def _repeated(key: str, *, extension: str) -> Refused:
    return Refused(
        "duplicate_member",
        detail=f"The sample '{key}' has several members '{extension}'",
        value=extension,
    )


def _find_danger(name: str) -> str | None:
    if name[:1] == "/":
        return "at an absolute path"
    if ".." in name.split("/"):
        return "at a path that leaves the folder"
    return "of a name with a zero byte" if "\0" in name else None
