"""A process that sends a release to Weights & Biases: a run's folder and a release in.

It is a process of its own, so that it can be ended where it hangs. `export.attach` starts it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from diptych.core.children import follow_parent
from diptych.monitor.run_folder import RunFolder
from diptych.monitor.sinks.wandb import send_release


def main(arguments: Sequence[str] | None = None) -> None:
    """Send the release that the arguments name.

    Args:
        arguments: the command line; sys.argv's if None.
    """
    parser = argparse.ArgumentParser(prog="diptych.monitor.sinks.release")
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--release", type=Path, required=True)
    parser.add_argument("--facts", type=json.loads, required=True)
    options = parser.parse_args(arguments)
    follow_parent()
    folder = RunFolder(options.run)
    send_release(folder.path, spec=folder.read_spec(), release=options.release, facts=options.facts)


if __name__ == "__main__":
    main()
