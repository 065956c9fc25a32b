"""Prints the nodes of the cluster at `RAY_ADDRESS` as one line of JSON. The doctor runs it as a separate process."""

from __future__ import annotations

import json
import os
import sys

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from roll.ray.cluster import ClusterUnavailable, join_cluster

SECONDS = 60.0
"""Deadline for every node to start a worker."""


@ray.remote(num_cpus=0)
def niceness() -> int:
    """Return the niceness of a Ray worker."""
    return os.nice(0)


def main() -> None:
    try:
        join_cluster()
    except ClusterUnavailable as error:
        sys.exit(str(error).splitlines()[0])
    nodes = sorted((node for node in ray.nodes() if node["Alive"]), key=lambda node: node["NodeManagerAddress"])
    there = [NodeAffinitySchedulingStrategy(node["NodeID"], soft=False) for node in nodes]
    found = ray.get([niceness.options(scheduling_strategy=place).remote() for place in there], timeout=SECONDS)
    ray.shutdown()
    places = [(node["NodeManagerAddress"], int(node["Resources"].get("GPU", 0))) for node in nodes]
    print(
        json.dumps(
            [
                {"address": host, "gpus": gpus, "niceness": nice}
                for (host, gpus), nice in zip(places, found, strict=True)
            ]
        )
    )


if __name__ == "__main__":
    main()
