"""`python -m diptych` and `diptych`: `kedro run` of the installed package."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any


def main(*args: Any, **options: Any) -> Any:
    """Run pipelines; the arguments are those of `kedro run`."""
    from kedro.framework.project import configure_project

    configure_project(Path(__file__).parent.name)
    from diptych.cli import run

    options["standalone_mode"] = not hasattr(sys, "ps1")
    return run(*args, **options)


if __name__ == "__main__":
    main()
