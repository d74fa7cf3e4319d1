"""The FLOPs that we count, beside those that torch counts while a model of each family runs.

Peer: `torch.utils.flop_counter.FlopCounterMode`, which adds up the matrix products that really run
(attention by torch's plain kernel, of which it sees every product). The cases are the small models
of `tests/families`, every family and composition of towers, each on a batch of its corpus; counted
are the forward pass and a step of training, with everything trained and with a frozen vision tower,
whose backward pass is left out. Both counts are those that the test of it compares.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from _families import Tested, run_tests
from run import Measured

MAX_DIFFERENCE = 0.01
COUNTS = ("forward", "forward_of_torch", "training", "training_of_torch")
DIFFERENCES = ("forward_difference", "training_difference")


def measure(options: argparse.Namespace) -> Measured:
    """Run the test of all families, and compare what it counted."""
    tested, _ = run_tests("-k", "test_flops_are_those_torch_counts")
    return judge(tested)


def judge(tested: Sequence[Tested]) -> Measured:
    """Find the largest relative difference.

    Raises:
        RuntimeError: a test ended before it had counted.
    """
    rows = []
    for each in tested:
        counts = {name: float(each.properties.get(name, "nan")) for name in COUNTS}
        rows.append(
            {
                "test": each.name,
                "case": each.properties["case"],
                **counts,
                "forward_difference": counts["forward"] / counts["forward_of_torch"] - 1,
                "training_difference": counts["training"] / counts["training_of_torch"] - 1,
            }
        )
    differences = [abs(row[name]) for row in rows for name in DIFFERENCES]
    if not differences or any(value != value for value in differences):
        raise RuntimeError("a test of FLOPs ended before it had counted: see pytest's output above")
    worst = max(differences)
    return Measured(
        unit="GFLOPs of training in all cases together",
        ours=sum(row["training"] for row in rows) / 1e9,
        peers={"torch's counter": sum(row["training_of_torch"] for row in rows) / 1e9},
        ratio=worst,
        goal=f"at most {MAX_DIFFERENCE}: the largest relative difference of a case, forward or "
        "training",
        met=worst <= MAX_DIFFERENCE,
        raw={"rows": rows},
    )


if __name__ == "__main__":
    from run import main

    main(["flops"])
