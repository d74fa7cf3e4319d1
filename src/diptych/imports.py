"""`kedro import-deepspeed`: a DeepSpeed configuration in, a table and maybe a folder of conf/ out.

What each of its keys means is `plan/deepspeed_config.py`'s knowledge.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from diptych.core.errors import ConfigError
from diptych.core.files import write_text
from diptych.plan.deepspeed_config import Import, read_deepspeed


def read_config(path: Path) -> Import:
    """Read a DeepSpeed configuration from its file.

    Raises:
        ConfigError: there is no such file, it is no JSON, or it cannot be translated.
    """
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{path} is no JSON: {error}") from None
    return read_deepspeed(config)


def show_import(found: Import, *, present: Mapping[str, Any]) -> None:
    """Print what the configuration means, what it would change, and what is left out."""
    console = Console()
    changed = {each.ours: now for each, now in found.overrides(present)}
    table = _table("DeepSpeed", "setting", "value", "instead of", title="Taken over")
    for each in found.taken:
        now = str(changed[each.ours]) if each.ours in changed else ""
        table.add_row(each.theirs, each.ours, str(each.value), now)
    console.print(table)
    if found.left:
        table = _table("DeepSpeed", "why", title="Left out")
        for each in found.left:
            table.add_row(each.theirs, each.why)
        console.print(table)


def write_import(found: Import, *, folder: Path) -> list[Path]:
    """Write the settings as a folder of conf/, one file for a top-level key.

    Raises:
        ConfigError: a file is there already; nothing is written.
    """
    parts = {
        folder / f"parameters_{name}.yml": {name: part} for name, part in found.parameters().items()
    }
    there = [path for path in parts if path.exists()]
    if there:
        raise ConfigError(
            f"{there[0]} is there already",
            cure="Name another --env, or move the file away",
        )
    folder.mkdir(parents=True, exist_ok=True)
    for path, part in parts.items():
        text = yaml.safe_dump(part, sort_keys=False)
        write_text(path, text=f"# Read from a DeepSpeed configuration.\n{text}")
    return list(parts)


def _table(*columns: str, title: str) -> Table:
    table = Table(title=title)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
