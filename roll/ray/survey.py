"""Prints the nodes of the cluster at `RAY_ADDRESS` as one line of JSON. The doctor runs it as a separate process.

Every node opens a port at the address where gloo would listen, and every other node connects to it.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Iterator, Sequence

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from roll.ray.cluster import ClusterUnavailable, join_cluster
from roll.system.addresses import interface_of, listening_place, own_interfaces, socket_variables

SECONDS = 60.0
"""Deadline for every node to start a worker, and for all connections of a node."""
REACH_SECONDS = 5.0
"""Deadline for one connection."""


@ray.remote(num_cpus=0)
class Probe:
    """A Ray worker of a node."""

    def __init__(self) -> None:
        self._doors: list[socket.socket] = []

    def niceness(self) -> int:
        """Return the niceness of a Ray worker."""
        return os.nice(0)

    def interface(self) -> str | None:
        """Return the interface that holds Ray's address of the node, None if none does."""
        return interface_of(ray.util.get_node_ip_address(), own_interfaces())

    def listen(self) -> tuple[str, int, str]:
        """Listen where a run's gloo would, and return the address, the port (0 if it failed) and why it failed."""
        own = own_interfaces()
        variables = dict(os.environ) | socket_variables(ray.util.get_node_ip_address(), own, os.environ)
        address = listening_place(False, own, variables).address
        try:
            door = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
        except OSError as error:
            return address, 0, error.strerror or str(error)
        self._doors.append(door)
        return address, door.getsockname()[1], ""

    def unreached(self, others: Sequence[tuple[str, int, str]]) -> list[str]:
        """Return why other nodes, given as `listen` returned them, cannot be reached."""
        return [f"{address}: {why}" for address, port, said in others if (why := said or _refusal(address, port))]


def _refusal(address: str, port: int) -> str:
    try:
        socket.create_connection((address, port), REACH_SECONDS).close()
    except OSError as error:
        return error.strerror or "no answer"
    return ""


def main() -> None:
    try:
        join_cluster()
    except ClusterUnavailable as error:
        sys.exit(" ".join(str(error).split("\n")[:1]))
    nodes = sorted((node for node in ray.nodes() if node["Alive"]), key=lambda node: node["NodeManagerAddress"])
    print(json.dumps(list(survey(nodes))))


def survey(nodes: Sequence[dict[str, object]]) -> Iterator[dict[str, object]]:
    """Yield what is known of each node: address, GPUs, niceness, interface, and which nodes it does not reach."""
    strategies = [NodeAffinitySchedulingStrategy(str(node["NodeID"]), soft=False) for node in nodes]
    probes = [Probe.options(scheduling_strategy=place).remote() for place in strategies]
    doors = ray.get([probe.listen.remote() for probe in probes], timeout=SECONDS)
    asked = [(probe.niceness.remote(), probe.interface.remote()) for probe in probes]
    reached = [
        probe.unreached.remote([door for other, door in enumerate(doors) if other != number])
        for number, probe in enumerate(probes)
    ]
    for node, refs, ref in zip(nodes, asked, reached, strict=True):
        resources = node["Resources"]
        assert isinstance(resources, dict)
        nice, interface = ray.get(list(refs), timeout=SECONDS)
        yield {
            "address": node["NodeManagerAddress"],
            "gpus": int(resources.get("GPU", 0)),
            "niceness": nice,
            "interface": interface,
            "unreached": ray.get(ref, timeout=SECONDS),
        }


if __name__ == "__main__":
    main()
