"""Places the plan's ranks: chooses the node, the visible devices and the environment of each process."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import ray

from roll.config.derived.placement import RolePlan

QUIET = {
    # At each collective, torch.distributed warns about deprecated calls. Only DeepSpeed could change these calls.
    "PYTHONWARNINGS": "ignore::FutureWarning,ignore::UserWarning",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TQDM_DISABLE": "1",
}


@dataclass(frozen=True)
class WorkerPlacement:
    """Placement of one rank of a role."""

    node_id: str | None
    """Ray's id of the node, None for any node."""
    device: str
    """`cpu` or `cuda`."""
    environment: Mapping[str, str]
    devices: tuple[int, ...] = ()
    """Numbers of the rank's devices, counted over all nodes."""
    local_devices: tuple[int, ...] = ()
    """Numbers of the rank's devices, counted on its node."""
    place: int = 0
    """Number of the node among those of the plan on GPUs; number of the rank on the CPU. See `NodePlaces`."""


class NodePlaces:
    """The nodes of a run. A node keeps its place as long as it lives, so that its devices keep their numbers.

    The place of a lost node is taken by a node that has none: one that has joined since, or one that the plan left out.
    """

    def __init__(self, gpu_places: int | None = None) -> None:
        """`gpu_places` is the number of nodes on whose GPUs the plan has roles, None for all nodes with GPUs."""
        self._gpu_places = gpu_places
        self._gpu, self._cpu = list[str](), list[str]()

    def of_gpus(self) -> list[str]:
        """Return the nodes of the plan's devices, in order. A lost one is among them while it has no successor."""
        living = gpu_nodes()
        self._gpu = refilled(self._gpu, living) if self._gpu else living[: self._gpu_places]
        return self._gpu

    def of_cpu(self) -> list[str]:
        """Return the living nodes, to which ranks on the CPU are assigned round-robin."""
        living = cpu_nodes()
        self._cpu = refilled(self._cpu or living, living)
        return [node for node in self._cpu if node in living]

    def living(self, placement: WorkerPlacement) -> WorkerPlacement:
        """Return the placement for a new process: on the same node if that lives, else where its place is now."""
        if placement.node_id is None or not is_lost(placement.node_id):
            return placement
        nodes = self.of_gpus() if placement.devices else self.of_cpu()
        return replace(placement, node_id=nodes[placement.place % len(nodes)])


def refilled(places: Sequence[str], living: Sequence[str]) -> list[str]:
    """Return the places with living nodes that had none in those of lost ones, in order, as far as there are any."""
    spare = [node for node in living if node not in places]
    return [node if node in living or not spare else spare.pop(0) for node in places]


def worker_placements(
    role: RolePlan,
    gpus_per_node: int,
    system_envs: Mapping[str, str],
    cpu_ranks: int = 0,
    places: NodePlaces | None = None,
) -> list[WorkerPlacement]:
    """Return the placement of each rank. A process sees only its rank's devices, which other roles may share.

    Args:
        cpu_ranks: number of ranks of all roles with a model on the CPU, which share the cores of their hosts.
        places: the run's nodes; None for those of the cluster at present.
    """
    kept = places or NodePlaces()
    nodes, hosts = kept.of_gpus(), kept.of_cpu()
    threads = max(1, len(os.sched_getaffinity(0)) * len(hosts) // max(role.ranks, cpu_ranks))
    out = []
    for rank, devices in enumerate(role.devices):
        environment = rank_environment(rank, role.ranks, None if devices else threads) | dict(system_envs)
        place = devices[0] // gpus_per_node if devices else 0 if role.is_outside else rank
        node = nodes[place] if devices else hosts[place % len(hosts)]
        out.append(
            WorkerPlacement(
                node,
                "cuda" if devices else "cpu",
                environment,
                devices,
                tuple(device % gpus_per_node for device in devices),
                place,
            )
        )
    return out


def gpu_nodes() -> list[str]:
    """Return the ids of the nodes with GPUs, in the order of their addresses. Devices are numbered in this order."""
    return [node["NodeID"] for node in _with_gpus()]


def gpu_counts() -> list[int]:
    """Return the number of GPUs of each of the `gpu_nodes`."""
    return [int(node["Resources"]["GPU"]) for node in _with_gpus()]


def cpu_nodes() -> list[str]:
    """Return the ids of all nodes for ranks on the CPU: the driver's node, then the others by address.

    Ranks are assigned round-robin. The first ranks of all roles are thus on the driver's host, and can sync through its
    shared memory.
    """
    own = ray.get_runtime_context().get_node_id()
    return [own, *(node["NodeID"] for node in _alive() if node["NodeID"] != own)]


def _with_gpus() -> list[Mapping[str, Any]]:
    return [node for node in _alive() if node["Resources"].get("GPU")]


def address_of(node_id: str | None) -> str:
    """Return the address of a node, dead or alive; of the driver's node for None. Ray's head is asked once for each."""
    own = ray.get_runtime_context().get_node_id() if node_id is None else node_id
    try:
        return _address_of_known(own)
    except LookupError:
        return own


@cache
def _address_of_known(node_id: str) -> str:
    """Return a node's address, which never changes: a question to a lost head would block the driver."""
    return {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}[node_id]


def is_lost(node_id: str | None) -> bool:
    """Return whether Ray knows that a node has died, or has not heard from it for too long."""
    return any(node["NodeID"] == node_id and not node["Alive"] for node in ray.nodes())


def _alive() -> list[Mapping[str, Any]]:
    """Return the live nodes, sorted by the numeric values of their addresses."""
    return sorted(
        (node for node in ray.nodes() if node["Alive"]), key=lambda node: int(ip_address(node["NodeManagerAddress"]))
    )


def rank_environment(rank: int, world_size: int, threads: int | None) -> dict[str, str]:
    """Return a rank's variables for torch, DeepSpeed and vLLM. `LOCAL_RANK` is 0: a worker sees its own devices.

    `threads` is the number of threads of a rank on the CPU, None on GPUs.
    """
    environment = QUIET | {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": "0"}
    # By default torch would cache compiled kernels in the run's temporary folder, which is removed at the end. The next
    # run should find the kernels.
    environment["TORCHINDUCTOR_CACHE_DIR"] = str(Path.home() / ".cache" / "roll" / "torchinductor")
    if threads is None:  # the process itself selects its devices, so Ray must not hide any
        return environment | {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
    return environment | {
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": str(threads),
        # A waiting thread would spin on a core that another process needs, even that of the thread that it waits for.
        "OMP_WAIT_POLICY": "passive",
        # vLLM would bind the threads of each engine to the same cores, and take one for each core.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
