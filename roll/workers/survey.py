"""Prints the nodes of the cluster that `RAY_ADDRESS` names as one line of JSON. A process of the doctor."""

from __future__ import annotations

import json

import ray

from roll.workers.cluster import join


def main() -> None:
    join()
    nodes = [{"address": node["NodeManagerAddress"], "gpus": int(node["Resources"].get("GPU", 0))} for node in ray.nodes() if node["Alive"]]
    ray.shutdown()
    print(json.dumps(sorted(nodes, key=lambda node: node["address"])))


if __name__ == "__main__":
    main()
