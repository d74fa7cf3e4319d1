"""A Ray cluster of two nodes with a core each, until standard input ends; prints its address."""

from __future__ import annotations

import os
import sys


def main(folder: str) -> None:
    # Not an option: part of it writes into the default folder.
    os.environ["RAY_TMPDIR"] = folder
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 1, "object_store_memory": 80 * 1024**2, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "node_ip_address": "127.0.0.1"})
    cluster.add_node(**node, node_ip_address="127.0.0.1")
    print(cluster.address, flush=True)
    sys.stdin.read()
    cluster.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
