"""A Ray cluster of two nodes with a core each, until standard input ends; prints its address.

A line of input cuts the second node's power.
"""

from __future__ import annotations

import os
import sys


def main(folder: str) -> None:
    # Not an option: part of it writes into the default folder.
    os.environ["RAY_TMPDIR"] = folder
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 1, "object_store_memory": 80 * 1024**2, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "node_ip_address": "127.0.0.1"})
    second = cluster.add_node(**node, node_ip_address="127.0.0.1")
    print(cluster.address, flush=True)
    if sys.stdin.readline():
        cluster.remove_node(second, allow_graceful=False)
        sys.stdin.read()
    cluster.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
