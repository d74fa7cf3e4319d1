"""What a run finds around it: scheduler, packages, git, tracker, network. A spec in, checks out.

No value of an environment variable is shown that the settings did not put there.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from diptych.core import provenance
from diptych.core.errors import ConfigError
from diptych.core.floors import FLOORS, check_floors
from diptych.core.records import Check, Provenance, RunSpec
from diptych.launch.network import rank_environment

_NETWORK = re.compile(r"(NCCL|GLOO|TORCH|UCX|FI|RDMAV|OMPI)_")
_PIN = re.compile(r"([A-Za-z0-9._-]+)==(\S+)")


def check_git(found: Provenance) -> Check:
    """Say whether the code that runs can be found again."""
    if found.git_commit is None:
        return Check(
            name="git",
            status="warn",
            found="the code is in no git repository",
            cure="Commit it, so that a run's code can be found again",
        )
    if found.git_dirty:
        return Check(
            name="git",
            status="warn",
            found=f"{found.git_commit[:12]} with changes that are not committed",
            cure="Commit them, so that this run's code can be found again",
        )
    return Check(name="git", status="pass", found=f"{found.git_commit[:12]}, clean")


def check_versions(constraints: Path = Path("constraints.txt")) -> Check:
    """Hold what is installed against the floors, and against what the tests ran with."""
    try:
        check_floors()
    except ConfigError as error:
        return Check(name="versions", status="fail", found=error.found, cure=error.cure.strip())
    names = dict.fromkeys([*provenance.PACKAGES, *(floor.package for floor in FLOORS)])
    installed = {name: _version(name) for name in names}
    there = {name: version for name, version in installed.items() if version is not None}
    others = _unlike(there, constraints=constraints)
    if others:
        return Check(
            name="versions",
            status="warn",
            found=f"other than the tests ran with: {', '.join(others)}",
            cure=f"pip install -c {constraints} -e .",
        )
    told = ", ".join(f"{name} {version}" for name, version in there.items())
    return Check(name="versions", status="pass", found=told)


def _unlike(there: Mapping[str, str], *, constraints: Path) -> list[str]:
    """List versions that differ from the constraints; builds of one version are alike."""
    pinned = dict(_PIN.findall(constraints.read_text("utf-8"))) if constraints.is_file() else {}
    return [
        f"{name} {version} instead of {pinned[name]}"
        for name, version in there.items()
        if version.split("+")[0] != pinned.get(name, version).split("+")[0]
    ]


def check_tracker(tracker: str | None, *, environment: Mapping[str, str] = os.environ) -> Check:
    """Say whether a tracker's login is there; a key is not shown."""
    if tracker is None:
        return Check(name="tracker", status="skip", found="none is used")
    if importlib.util.find_spec(tracker) is None:
        found = f"{tracker} is not installed"
        return Check(name="tracker", status="fail", found=found, cure=f"pip install {tracker}")
    mode = environment.get("WANDB_MODE", "online")
    if mode in ("offline", "disabled"):
        return Check(name="tracker", status="pass", found=f"{tracker}, {mode}")
    netrc = Path(environment.get("NETRC", "~/.netrc")).expanduser()
    if environment.get("WANDB_API_KEY"):
        return Check(
            name="tracker", status="pass", found=f"{tracker}, with a key of the environment"
        )
    if netrc.is_file() and "api.wandb.ai" in netrc.read_text("utf-8", errors="replace"):
        return Check(name="tracker", status="pass", found=f"{tracker}, with a key of {netrc.name}")
    return Check(
        name="tracker",
        status="fail",
        found=f"{tracker} has no key",
        cure="Run: wandb login; or set WANDB_MODE=offline and send what it kept later",
    )


def check_network(
    spec: RunSpec, *, logs: Path, environment: Mapping[str, str] = os.environ
) -> Check:
    """List the variables that ranks talk by, and which others this environment brings along."""
    ours = rank_environment(spec, logs=logs)
    set_here = [f"{name}={value}" for name, value in ours.items() if _NETWORK.match(name)]
    others = sorted(name for name in environment if _NETWORK.match(name) and name not in ours)
    told = " ".join(set_here) or "left to the libraries"
    also = f"; also set in the environment: {', '.join(others)}" if others else ""
    return Check(name="network", status="pass", found=told + also)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
