"""The route of each engine's weights, from the plan."""

from __future__ import annotations

import pytest

from roll.config.derived.placement import RolePlan
from roll.weight_sync.routes import Route, Transport, broadcast_size, routes, sharing_ranks


def role(name: str, *devices: tuple[int, ...]) -> RolePlan:
    return RolePlan(name, "vllm", devices)


def test_on_the_cpu_files_reach_every_engine() -> None:
    engine_routes = routes(role("actor_train", (), ()), role("actor_infer", (), ()), 8)
    assert engine_routes == [Route(Transport.FILE, True)] * 2
    assert broadcast_size(engine_routes, 1) == 0
    assert sharing_ranks(role("actor_train", (), ()), role("actor_infer", (), ()), engine_routes) == [False, False]


def test_engines_on_the_trainers_devices_share_and_others_are_broadcast_to() -> None:
    train = role("actor_train", *((device,) for device in range(4)))
    infer = role("actor_infer", (2, 3), (4, 5), (6, 7))
    engine_routes = routes(train, infer, 8)
    assert engine_routes == [Route(Transport.SHARED, True), Route(Transport.BROADCAST, True, 1), Route(Transport.BROADCAST, True, 3)]
    assert broadcast_size(engine_routes, 2) == 5
    assert sharing_ranks(train, infer, engine_routes) == [False, False, True, True]


def test_sixteen_devices_on_two_nodes_share_them_as_in_the_example() -> None:
    train = role("actor_train", *((device,) for device in range(16)))
    infer = role("actor_infer", *((device,) for device in range(12)))
    engine_routes = routes(train, infer, 8)
    assert [route.transport for route in engine_routes] == [Transport.SHARED] * 12
    assert [route.same_host for route in engine_routes] == [True] * 8 + [False] * 4
    assert sharing_ranks(train, infer, engine_routes) == [True] * 12 + [False] * 4


@pytest.mark.parametrize("width", [1, 2])
def test_every_worker_of_a_broadcast_has_a_rank_of_its_own(width: int) -> None:
    engines = [tuple(range(1 + width * number, 1 + width * (number + 1))) for number in range(3)]
    engine_routes = routes(role("actor_train", (0,)), role("actor_infer", *engines), 8)
    ranks = [0] + [route.first_rank + worker for route in engine_routes for worker in range(width)]
    assert ranks == list(range(broadcast_size(engine_routes, width)))
