"""The transport of the weights to each engine, derived from the placement of the roles."""

from __future__ import annotations

import pytest

from roll.config.derived.placement import RolePlan
from roll.weight_sync.routes import Route, Transport, broadcast_size, count_openers, find_routes, routes


def role(name: str, *devices: tuple[int, ...]) -> RolePlan:
    return RolePlan(name, "vllm", devices)


def test_on_one_host_files_reach_every_engine() -> None:
    found = find_routes(role("actor_train", (), ()), role("actor_infer", (), ()), 8, lambda engine: True, range(2))
    assert found.to == dict.fromkeys(range(2), Route(Transport.FILE, True))
    assert found.broadcast_size == 0 and found.openers == [0, 0]


def test_engines_on_other_cpu_hosts_receive_broadcast() -> None:
    found = find_routes(role("actor_train", ()), role("actor_infer", (), (), ()), 8, lambda engine: engine == 2, [2, 1])
    assert found.to == {1: Route(Transport.BROADCAST, False, 1), 2: Route(Transport.BROADCAST, True, 2)}
    assert found.broadcast_size == 3
    alone = find_routes(role("actor_train", ()), role("actor_infer", (), (), ()), 8, lambda engine: engine == 2, [2])
    assert alone.to == {2: Route(Transport.FILE, True)}, "the other engine left, so files reach all"


def test_engines_on_trainer_devices_share_others_receive_broadcast() -> None:
    train = role("actor_train", *((device,) for device in range(4)))
    infer = role("actor_infer", (2, 3), (4, 5), (6, 7))
    engine_routes = routes(train, infer, 8, range(3))
    broadcast = {1: Route(Transport.BROADCAST, True, 1), 2: Route(Transport.BROADCAST, True, 3)}
    assert engine_routes == {0: Route(Transport.SHARED, True, sharers=(2, 3))} | broadcast
    assert broadcast_size(engine_routes.values(), 2) == 5
    assert count_openers(4, engine_routes.values()) == [0, 0, 1, 1]


def test_example_shares_sixteen_devices_on_two_nodes() -> None:
    train = role("actor_train", *((device,) for device in range(16)))
    infer = role("actor_infer", *((device,) for device in range(12)))
    engine_routes = routes(train, infer, 8, range(12))
    assert [route.transport for route in engine_routes.values()] == [Transport.SHARED] * 12
    assert [route.same_host for route in engine_routes.values()] == [True] * 8 + [False] * 4
    assert count_openers(16, engine_routes.values()) == [1] * 12 + [0] * 4


@pytest.mark.parametrize("width", [1, 2])
def test_broadcast_workers_have_consecutive_ranks(width: int) -> None:
    engines = [tuple(range(1 + width * number, 1 + width * (number + 1))) for number in range(3)]
    engine_routes = routes(role("actor_train", (0,)), role("actor_infer", *engines), 8, range(3))
    ranks = [0] + [route.first_rank + worker for route in engine_routes.values() for worker in range(width)]
    assert ranks == list(range(broadcast_size(engine_routes.values(), width)))


def test_excluded_engine_leaves_no_gap_in_broadcast() -> None:
    train, infer = role("actor_train", (0,)), role("actor_infer", (0,), (1,), (2,), (3,))
    found = find_routes(train, infer, 8, lambda engine: True, [3, 1])
    assert found.to == {1: Route(Transport.BROADCAST, True, 1), 3: Route(Transport.BROADCAST, True, 2)}
    assert found.broadcast_size == 3
    assert found.openers == [0], "the only engine that shares the trainer's device is left out"
