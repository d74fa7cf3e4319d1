"""What is refused before any node runs: entries that could run code, places that links lead away.

In: the catalog's configuration and the folders of the parameters. Out: nothing, or a ConfigError.
The catalog names Python classes, which Kedro imports; here it may name only our own kinds.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from diptych import datasets
from diptych.core.errors import ConfigError, nearest
from diptych.data.files.store import is_url

KINDS = frozenset(
    f"{datasets.__name__}.{name}"
    for name, value in vars(datasets).items()
    if isinstance(value, type)
    and issubclass(value, datasets.Artifact)
    and value is not datasets.Artifact
)
"""What `type` may be in the catalog."""

_IMPORTS = ("validator",)
"""Other keys of an entry for which Kedro imports what they name."""


def check_catalog(entries: Mapping[str, Any]) -> None:
    """Refuse an entry that names code other than ours; nothing of it is imported.

    Raises:
        ConfigError: names the entry and what it may be.
    """
    for name, entry in entries.items():
        if name.startswith("_"):
            continue  # a YAML anchor's place: Kedro makes no entry of it
        kind = entry.get("type") if isinstance(entry, Mapping) else None
        if not isinstance(kind, str) or kind not in KINDS:
            raise ConfigError(
                f"The catalog's entry '{name}' has the type {kind!r}, which Kedro would import",
                allowed=nearest(str(kind), allowed=KINDS),
                cure="Name one of our kinds; a new one is a class in src/diptych/datasets.py",
            )
        for key in _IMPORTS:
            if key in entry:
                raise ConfigError(
                    f"The catalog's entry '{name}' has '{key}', which Kedro would import",
                    allowed="No code is named in the configuration",
                    cure=f"Take '{key}' out of the entry",
                )


def places(entries: Mapping[str, Any], folders: Iterable[str]) -> list[str]:
    """List the paths that a run writes to: the catalog's, and the folders of the parameters."""
    found = [entry.get("filepath") for entry in entries.values() if isinstance(entry, Mapping)]
    return [path for path in [*found, *folders] if isinstance(path, str)]


def check_links(paths: Iterable[str], *, project: Path) -> None:
    """Refuse a path that a link inside `data` leads away from it, into git's folder or elsewhere.

    `data` itself may be a link: a person makes it to use another disk. A folder's link deeper
    inside comes with what was cloned or pulled, and would have a run write where it leads.

    Raises:
        ConfigError: names the link and where it leads.
    """
    data, checked = project / "data", set[Path]()
    inside = [path.resolve() for path in (project, data)]
    for path in paths:
        if os.path.isabs(path) or is_url(path) or ".." in Path(path).parts:
            continue  # written out by a person
        for part in [*reversed((project / path).parents), project / path]:
            if part in checked or part == data or not part.is_relative_to(project):
                continue
            checked.add(part)
            # A file's link is replaced when the file is written, and so is one into DVC's cache.
            if part.is_symlink() and not part.is_file():
                _check_link(part, inside=inside, project=project)


def _check_link(link: Path, *, inside: list[Path], project: Path) -> None:
    target = link.resolve()
    git = (project / ".git").resolve()
    if any(target.is_relative_to(root) for root in inside) and not target.is_relative_to(git):
        return
    raise ConfigError(
        f"'{link.relative_to(project)}' is a link that leads out of the project, to '{target}'",
        allowed="Links that stay inside the project; only `data` itself may lie elsewhere",
        cure="Remove the link if you did not make it; else link `data` as a whole, or give the "
        "path itself in conf/",
    )
