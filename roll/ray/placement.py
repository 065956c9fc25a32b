"""Places the plan's ranks: chooses the node, the visible devices and the environment of each process."""

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


def worker_placements(
    role: RolePlan, gpus_per_node: int, system_envs: Mapping[str, str], cpu_ranks: int = 0
) -> list[WorkerPlacement]:
    """Return the placement of each rank. A process sees only its rank's devices, which other roles may share.

    `cpu_ranks` is the number of ranks of all roles with a model on the CPU, which share the cores of their hosts.
    """
    nodes, hosts = gpu_nodes(), cpu_nodes()
    threads = max(1, len(os.sched_getaffinity(0)) * len(hosts) // max(role.ranks, cpu_ranks))
    out = []
    for rank, devices in enumerate(role.devices):
        environment = rank_environment(rank, role.ranks, None if devices else threads) | dict(system_envs)
        node = nodes[devices[0] // gpus_per_node] if devices else hosts[0 if role.is_outside else rank % len(hosts)]
        out.append(
            WorkerPlacement(
                node,
                "cuda" if devices else "cpu",
                environment,
                devices,
                tuple(device % gpus_per_node for device in devices),
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
    """Return the address of a node, dead or alive; of the driver's node for None."""
    own = ray.get_runtime_context().get_node_id() if node_id is None else node_id
    return next((node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == own), own)


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
