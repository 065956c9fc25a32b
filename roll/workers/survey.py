"""Prints the nodes of the cluster that `RAY_ADDRESS` names as one line of JSON. A process of the doctor."""

from __future__ import annotations

import json
import sys

import ray

from roll.workers.cluster import ClusterUnavailable, join


def main() -> None:
    try:
        join()
    except ClusterUnavailable as error:
        sys.exit(str(error).splitlines()[0])
    nodes = [{"address": node["NodeManagerAddress"], "gpus": int(node["Resources"].get("GPU", 0))} for node in ray.nodes() if node["Alive"]]
    ray.shutdown()
    print(json.dumps(sorted(nodes, key=lambda node: node["address"])))


if __name__ == "__main__":
    main()
