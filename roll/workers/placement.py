"""From the plan's ranks to placements: on which node of the cluster a process runs, what it sees, and its environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import ray

from roll.config.derived.placement import RolePlan

QUIET = {
    # Deprecation notices of torch.distributed, one a collective, are DeepSpeed's to act on.
    "PYTHONWARNINGS": "ignore::FutureWarning,ignore::UserWarning",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TQDM_DISABLE": "1",
}


@dataclass(frozen=True)
class WorkerPlacement:
    """Where one rank of a role runs."""

    node_id: str | None
    """Ray's id of the node; None where any node will do."""
    device: str
    """`cpu` or `cuda`."""
    environment: Mapping[str, str]
    """Environment variables of the process."""
    devices: tuple[int, ...] = ()
    """Counted over all nodes."""
    local_devices: tuple[int, ...] = ()
    """Counted over those that the node sees."""


def worker_placements(role: RolePlan, gpus_per_node: int, system_envs: Mapping[str, str]) -> list[WorkerPlacement]:
    """A placement for each rank. Roles on one device share it: a process sees the devices of its rank and no others."""
    nodes, hosts = gpu_nodes(), cpu_nodes()
    out = []
    for rank, devices in enumerate(role.devices):
        environment = rank_environment(rank, role.ranks, on_cpu=not devices) | dict(system_envs)
        node = nodes[devices[0] // gpus_per_node] if devices else hosts[rank % len(hosts)]
        out.append(
            WorkerPlacement(node, "cuda" if devices else "cpu", environment, devices, tuple(device % gpus_per_node for device in devices))
        )
    return out


def gpu_nodes() -> list[str]:
    """Ids of the nodes that have GPUs, in the order of their addresses: the order in which devices are counted."""
    return [node["NodeID"] for node in _with_gpus()]


def gpu_counts() -> list[int]:
    """GPUs of each of them."""
    return [int(node["Resources"]["GPU"]) for node in _with_gpus()]


def cpu_nodes() -> list[str]:
    """Ids of all nodes, over which the ranks of a role on the CPU are dealt out: the driver's own first, the others by address.

    So the first ranks of all roles share the driver's host, and what is synced through its memory is seen.
    """
    own = ray.get_runtime_context().get_node_id()
    return [own, *(node["NodeID"] for node in _alive() if node["NodeID"] != own)]


def _with_gpus() -> list[Mapping[str, Any]]:
    return [node for node in _alive() if node["Resources"].get("GPU")]


def _alive() -> list[Mapping[str, Any]]:
    """The nodes in the order of their addresses, counted as numbers."""
    return sorted((node for node in ray.nodes() if node["Alive"]), key=lambda node: int(ip_address(node["NodeManagerAddress"])))


def rank_environment(rank: int, world_size: int, on_cpu: bool) -> dict[str, str]:
    """What torch, DeepSpeed and vLLM read of a process's place. `LOCAL_RANK` is 0: a worker sees its own devices only."""
    environment = QUIET | {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": "0"}
    # By default compiled kernels lie among the temporary files, which end with the run; the next run is to find them.
    environment["TORCHINDUCTOR_CACHE_DIR"] = str(Path.home() / ".cache" / "roll" / "torchinductor")
    if not on_cpu:  # which devices it sees, the process finds where it is: Ray is not to say that it sees none
        return environment | {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
    threads = max(1, (os.cpu_count() or 1) // world_size)
    return environment | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": str(threads)}
