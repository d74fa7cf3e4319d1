"""The oldest versions that are run with: nothing in, or an error that says what is wrong with one.

Older ones have known holes that a file can use, whatever the code that reads it says. Nothing is
imported: the driver asks before any node, each rank before its first collective.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata

from diptych.core.errors import ConfigError


@dataclass(frozen=True)
class Floor:
    """The oldest release of a package without a known hole, and what the hole is."""

    package: str
    version: str
    hole: str


FLOORS = (
    Floor(
        package="torch",
        version="2.10",
        hole="a weights file can corrupt memory and run code although it is read with "
        "weights_only=True (CVE-2026-24747)",
    ),
    Floor(
        package="transformers",
        version="5.5.0",
        hole="a config.json can run code although trust_remote_code is False (CVE-2026-4372, "
        "CVE-2026-5241)",
    ),
    Floor(
        package="pillow",
        version="12.3",
        hole="a damaged image can write outside its buffer, and a small one fill the memory",
    ),
    Floor(
        package="pyarrow",
        version="14.0.1",
        hole="a Parquet file can run code when it is read (CVE-2023-47248)",
    ),
)
"""One line for each package that reads what others wrote; `docs/security.md` shows the same."""


def check_floors(version_of: Callable[[str], str] = metadata.version) -> None:
    """Refuse to run with a version that has a known hole; what is not installed reads nothing.

    Args:
        version_of: says which version of a distribution is installed.

    Raises:
        ConfigError: names every such package, its version, the floor, the hole and the cure.
    """
    problems, wanted = [], []
    for floor in FLOORS:
        try:
            found = version_of(floor.package)
        except metadata.PackageNotFoundError:
            continue
        if _is_older(found, than=floor.version):
            problems.append(
                f"  - {floor.package} {found} is older than {floor.version}: {floor.hole}"
            )
            wanted.append(f"'{floor.package}>={floor.version}'")
    if problems:
        raise ConfigError(
            "Some packages have known holes and are not run with:\n" + "\n".join(problems),
            cure=f"\nUpgrade: pip install {' '.join(wanted)}",
        )


def _is_older(version: str, *, than: str) -> bool:
    """Compare by the numbers of a release; what comes before a release is older than it."""
    release, later = _split(version)
    floor, _ = _split(than)
    width = max(len(release), len(floor))
    mine, least = (tuple(each) + (0,) * (width - len(each)) for each in (release, floor))
    return mine < least or (mine == least and bool(re.match(r"[.-]?(a|b|c|rc|dev|alpha)", later)))


def _split(version: str) -> tuple[tuple[int, ...], str]:
    found = re.match(r"(?:v|\d+!)?(\d+(?:\.\d+)*)", version)
    if found is None:
        return (0,), ""
    return tuple(int(number) for number in found[1].split(".")), version[found.end() :]
