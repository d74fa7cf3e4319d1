"""torch elastic's command: it starts a node's ranks, and starts them again when one fails."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

WorkerMode = Literal["train", "preflight"]
"""What ranks do: train, or only look at where they are."""
ANSWER = "ranks.json"
"""What the first rank leaves beside the logs once ranks have looked."""


def elastic_command(
    run: Path,
    *,
    logs: Path,
    num_nodes: str,
    ranks_per_node: int,
    max_restarts: int,
    meeting: Mapping[str, str],
    mode: WorkerMode = "train",
) -> list[str]:
    """Return the command that runs a node's ranks.

    Args:
        run: the run's folder.
        logs: of the ranks; what they print before they open their own goes below it.
        num_nodes: how many nodes take part, or `least:most`.
        ranks_per_node: how many ranks this node starts.
        max_restarts: how often failed ranks are started again.
        meeting: how nodes meet: torch elastic's options by name.
        mode: what ranks do.
    """
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        f"--nnodes={num_nodes}",
        f"--nproc-per-node={ranks_per_node}",
        *(f"--{name}={value}" for name, value in meeting.items()),
        f"--max-restarts={max_restarts}",
        "--monitor-interval=0.5",
        f"--log-dir={logs}",
        "--redirects=3",
        "--module",
        "diptych.worker",
        mode,
        str(run),
        # Not an option: torch elastic would take it for one of its own.
        str(logs),
    ]
