"""The nodes of a role's devices, and the check that the cluster has enough GPUs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.exceptions import ActorUnavailableError, ActorUnschedulableError, RayActorError

from roll.config.derived.placement import RolePlan
from roll.errors import ConfigError, WorkerDied
from roll.ray.cluster import check_gpus
from roll.ray.group import WorkerGroup
from roll.ray.placement import NodePlaces, WorkerPlacement, gpu_nodes, worker_placements


def node(address: str, gpus: int, alive: bool = True) -> dict[str, Any]:
    return {
        "NodeID": f"node at {address}",
        "NodeManagerAddress": address,
        "Resources": {"GPU": gpus} if gpus else {},
        "Alive": alive,
    }


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Return the list of nodes that `ray.nodes` returns, which a test fills."""
    found: list[dict[str, Any]] = []
    monkeypatch.setattr(ray, "nodes", lambda: found)
    monkeypatch.setattr(
        ray, "get_runtime_context", lambda: type("Context", (), {"get_node_id": lambda self: "node at 10.0.0.1"})()
    )
    return found


def test_devices_are_ordered_by_numeric_node_address(
    nodes: list[dict[str, Any]],
) -> None:
    nodes += [node("10.0.0.10", 4), node("10.0.0.9", 4), node("10.0.0.1", 0), node("10.0.0.2", 4, alive=False)]
    assert gpu_nodes() == ["node at 10.0.0.9", "node at 10.0.0.10"]
    places = worker_placements(RolePlan("actor_train", "deepspeed_train", ((3,), (4,))), 4, {"COLOUR": "blue"})
    assert [place.node_id for place in places] == gpu_nodes()
    assert [place.local_devices for place in places] == [(3,), (0,)]
    assert [place.environment["COLOUR"] for place in places] == ["blue"] * 2
    check_gpus(8, 4)


def test_addresses_may_be_of_version_6(nodes: list[dict[str, Any]]) -> None:
    nodes += [node("fd00::10", 1), node("fd00::9", 1)]
    assert gpu_nodes() == ["node at fd00::9", "node at fd00::10"]


def test_devices_keep_numbers_when_a_node_dies(nodes: list[dict[str, Any]]) -> None:
    nodes += [node(f"10.0.0.{number}", 4) for number in (2, 3, 4)]
    places, plan = NodePlaces(2), RolePlan("actor_train", "deepspeed_train", ((0,), (4,)))
    first, second = worker_placements(plan, 4, {}, places=places)
    nodes[0]["Alive"] = False
    assert places.living(second) == second, "its node lives, so another role may use the devices there"
    assert places.living(first).node_id == "node at 10.0.0.4", "the plan left this node free"
    nodes[2]["Alive"] = False
    lost = places.living(first)
    assert lost.node_id == "node at 10.0.0.4" and lost.local_devices == (0,)
    nodes += [node("10.0.0.1", 4)]
    after = worker_placements(plan, 4, {}, places=places)
    assert [place.node_id for place in after] == ["node at 10.0.0.1", "node at 10.0.0.3"]


def test_cpu_ranks_leave_a_lost_host(nodes: list[dict[str, Any]]) -> None:
    nodes += [node(f"10.0.0.{number}", 0) for number in (1, 2, 3)]
    places, plan = NodePlaces(), RolePlan("rewards.math", "reward", ((),) * 3)
    before = worker_placements(plan, 8, {}, places=places)
    nodes[1]["Alive"] = False
    assert [places.living(place).node_id for place in before] == [f"node at 10.0.0.{host}" for host in (1, 3, 3)]
    nodes += [node("10.0.0.4", 0)]
    assert places.living(before[1]).node_id == "node at 10.0.0.4"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ActorUnschedulableError("the node has gone"), "its host 10.0.0.7 is lost: the node has gone"),
        (
            RayActorError(error_msg="the actor's node was terminated unexpectedly: no heartbeats"),
            "its host 10.0.0.7 is lost: no heartbeats",
        ),
        (
            ActorUnavailableError(
                "The actor is temporarily unavailable: RpcError: RPC error: Socket closed rpc_code: 14", None
            ),
            "its process on host 10.0.0.7 was not reached for a while: RpcError: RPC error: Socket closed rpc_code: 14",
        ),
    ],
)
def test_a_host_that_is_not_reached_is_named(
    error: Exception, said: str, nodes: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes += [node("10.0.0.7", 0, alive=False)]
    group: Any = WorkerGroup("actor_train", [], tmp_path, tmp_path / "record", blocking=True)
    monkeypatch.setattr(group, "_placements", [WorkerPlacement("node at 10.0.0.7", "cpu", {})])
    monkeypatch.setattr(group, "_logs", [tmp_path / "actor_train-0.log"])
    failure = group._failure([(0, error)])
    assert isinstance(failure, WorkerDied), "a loss, so that the role is restarted"
    assert failure.cause == f"{said} (logs/actor_train-0.log)"


@pytest.mark.parametrize(
    ("hosts", "ranks", "cpu_ranks", "threads"), [(1, 2, 0, 4), (1, 2, 4, 2), (1, 1, 3, 2), (1, 1, 20, 1), (2, 1, 4, 4)]
)
def test_threads_of_cpu_ranks_fit_cores(
    nodes: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    hosts: int,
    ranks: int,
    cpu_ranks: int,
    threads: int,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    nodes += [node(f"10.0.0.{number}", 0) for number in range(1, hosts + 1)]
    for place in worker_placements(RolePlan("reference", "hf_infer", ((),) * ranks), 8, {}, cpu_ranks):
        assert place.environment["OMP_NUM_THREADS"] == str(threads)
        assert place.environment["OMP_WAIT_POLICY"] == "passive"


@pytest.mark.parametrize(
    ("counts", "gpus", "counted"),
    [
        ((8,), 16, r"\[8\]"),
        ((4, 8), 16, r"\[4, 8\]"),
        ((2, 8), 8, r"\[2, 8\]"),  # the 8 devices would be on the first node, which has 2
    ],
)
def test_too_few_gpus_are_reported_per_node(
    nodes: list[dict[str, Any]], counts: tuple[int, ...], gpus: int, counted: str
) -> None:
    nodes += [node(f"10.0.0.{number}", count) for number, count in enumerate(counts, 1)]
    needed = -(-gpus // 8)
    with pytest.raises(ConfigError, match=rf"{gpus} GPUs on {needed} node\(s\) .* have {counted}") as raised:
        check_gpus(gpus, 8)
    assert [(fault.place, fault.code) for fault in raised.value.faults] == [("device_mapping", "too_large")]


@pytest.mark.parametrize(
    ("address", "where"), [(None, "Ray sees none on this host"), ("10.0.0.1:6379", "no node of the cluster has one")]
)
def test_no_gpus_fault_explains_cpu_run(
    address: str | None, where: str, nodes: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if address:
        monkeypatch.setenv("RAY_ADDRESS", address)
    nodes += [node("10.0.0.1", 0)]
    with pytest.raises(ConfigError, match=rf"device_mapping: asks for 8 GPUs, and {where}") as raised:
        check_gpus(8, 8)
    remedy = str(raised.value).partition("\n")[2]
    assert "~actor_train.device_mapping ~actor_infer.device_mapping" in remedy


def test_enough_gpus_pass(nodes: list[dict[str, Any]]) -> None:
    nodes += [node("10.0.0.1", 8), node("10.0.0.2", 8), node("10.0.0.3", 2)]
    for gpus in (0, 1, 8, 16):
        check_gpus(gpus, 8)
