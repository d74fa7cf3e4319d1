"""What nodes must have alike: the training sources, the packages, the clocks.

In: what each node says of itself, the first one first. Out: a `Check` that names who differs. Used
where nodes meet and where their ranks do; no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from diptych.core.records import Check

_CLOCK_WARN_S, _CLOCK_FAIL_S = 5.0, 10.0


def compare_code(nodes: Sequence[Mapping[str, Any]]) -> Check:
    """Compare the training sources of the nodes with the first one's.

    Args:
        nodes: each with its name as `node`, and the hash of its sources as `code`.
    """
    others = sorted({each["node"] for each in nodes if each["code"] != nodes[0]["code"]})
    if others:
        return Check(
            name="code",
            status="fail",
            found=f"The code on {some(others)} is other than on {nodes[0]['node']}",
            cure="Have all nodes run from one folder, or update it on each",
            where="ranks",
        )
    found = f"the same on {_count(nodes)}"
    return Check(name="code", status="pass", found=found, where="ranks")


def compare_versions(nodes: Sequence[Mapping[str, Any]]) -> Check:
    """Compare the packages of the nodes with the first one's.

    Args:
        nodes: each with its name as `node`, and its packages by name as `versions`.
    """
    first = nodes[0]
    others: dict[str, list[str]] = {}
    for each in nodes:
        for name, version in each["versions"].items():
            expected = first["versions"].get(name)
            if version != expected:
                told = f"{name} is {version} on {{}} and {expected} on {first['node']}"
                names = others.setdefault(told, [])
                if each["node"] not in names:
                    names.append(each["node"])
    if others:
        return Check(
            name="packages",
            status="fail",
            found="; ".join(told.format(some(names)) for told, names in others.items()),
            cure="Install the same versions on every node: pip install -c constraints.txt",
            where="ranks",
        )
    found = f"the same on {_count(nodes)}"
    return Check(name="packages", status="pass", found=found, where="ranks")


def compare_clocks(names: Sequence[str], *, times_s: Sequence[float]) -> Check:
    """Compare clocks that were read at one moment.

    Args:
        names: of the node of each.
        times_s: what each read, in seconds since 1970 or since another moment that they share.
    """
    least, most = min(times_s), max(times_s)
    off = most - least
    if off <= _CLOCK_WARN_S:
        return Check(
            name="clocks", status="pass", found=f"within {max(off, 0.1):.1f} s", where="ranks"
        )
    early, late = names[times_s.index(least)], names[times_s.index(most)]
    found = f"The clock of {late} is {off:.0f} s ahead of that of {early}"
    if len(set(names)) > 2:
        middle = median(times_s)
        worst = max(range(len(names)), key=lambda number: abs(times_s[number] - middle))
        found += f"; furthest from the others' is that of {names[worst]}"
    return Check(
        name="clocks",
        status="fail" if off > _CLOCK_FAIL_S else "warn",
        found=found,
        cure=f"Set them by NTP (chronyc makestep, or timedatectl set-ntp true); at most "
        f"{_CLOCK_FAIL_S:g} s go, as torch elastic takes a node for dead after 15",
        where="ranks",
    )


def some(names: Sequence[str]) -> str:
    """Name up to three nodes, and say how many more there are."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _count(nodes: Sequence[Mapping[str, Any]]) -> str:
    num_nodes = len({each["node"] for each in nodes})
    return f"{num_nodes} node{'s' if num_nodes > 1 else ''}"
