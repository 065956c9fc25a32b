"""A device that `actor_infer` lists several times gets as many engines, if they share it with the trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from roll.config.derived.placement import placement_faults
from roll.config.plan.phases import phases
from roll.config.plan.plan import make_plan
from roll.config.schema.rlvr import RlvrConfig
from roll.weight_sync.routes import Transport, count_openers, routes
from tests.faults import coded
from tests.unit.config.small_shape import write_shape
from tests.unit.config.test_model_rewards import experiment

KV_CACHE = {"engine_args": {"kv_cache_memory_bytes": 1 << 30}}
PLACE = "actor_infer.device_mapping"


def engines_on(devices: list[int], **block: Any) -> RlvrConfig:
    """Return a configuration with engines on these devices and the trainer on devices 0 to 3."""
    engine = {"strategy_name": "vllm", "strategy_config": {**KV_CACHE, "gpu_memory_utilization": 0.3, **block}}
    return experiment({"world_size": 1}, "math_rule", actor_infer={"strategy_args": engine, "device_mapping": devices})


@pytest.mark.parametrize(
    ("devices", "block", "codes"),
    [
        ([0, 0, 1, 1], {}, []),
        ([0, 0], {"engine_args": {}}, ["duplicate"]),
        ([0, 0, 1, 1], {"tensor_parallel_size": 2}, ["duplicate"]),
        ([5, 5], {}, ["not_supported"]),
    ],
)
def test_repeated_devices_are_planned_or_refused(devices: list[int], block: dict[str, Any], codes: list[str]) -> None:
    found = placement_faults(engines_on(devices, **block))
    assert coded(found) == [(code, PLACE) for code in codes]


def test_other_roles_name_each_device_once() -> None:
    reference = {"strategy_args": {"strategy_name": "hf_infer"}, "device_mapping": [1, 1]}
    config = experiment({"world_size": 1}, "math_rule", reference=reference)
    assert ("duplicate", "reference.device_mapping") in coded(placement_faults(config))


def test_each_engine_of_a_device_counts(tmp_path: Path) -> None:
    write_shape(tmp_path)
    config = engines_on([0, 0, 1]).model_copy(update={"pretrain": str(tmp_path)})
    plan = make_plan(config)
    assert plan.roles["actor_infer"].devices == ((0,), (0,), (1,))
    [twice], [once] = ([phase for phase in phases(plan, device) if phase.name == "generation"] for device in (0, 1))
    assert (twice.held, twice.reserved_bytes) == (2 * once.held, 2 * once.reserved_bytes)
    assert once.reserved_bytes == plan.memory["actor_infer"].device["weights"] + (1 << 30)
    assert once.reserved_fraction == 0
    found = routes(plan.roles["actor_train"], plan.roles["actor_infer"], 8, range(3))
    assert {route.transport for route in found.values()} == {Transport.SHARED}
    assert [(route.sharers, route.turn) for route in found.values()] == [((0,), 0), ((0,), 1), ((1,), 0)]
    assert count_openers(2, found.values()) == [2, 1]
