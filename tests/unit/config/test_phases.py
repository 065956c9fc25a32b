"""Whether a phase fits into a GPU: what roles hold, beside all that engines reserve."""

from __future__ import annotations

import re
from typing import Any

import pytest

from roll.config.plan.advice import advice_lines
from roll.config.plan.phases import Phase, misfits
from roll.config.plan.plan import Plan
from roll.config.plan.show import device_lines, fit_line
from roll.config.schema.roles import ActorInferConfig
from roll.engines.vllm.checks import vllm_warnings
from roll.engines.vllm.engine_args import engine_args_faults
from roll.engines.vllm.settings import VllmConfig
from tests.faults import coded
from tests.unit.config.test_advice import GIB, planned

STAYS = ("gsm8k_rlvr", "time_sharing=false", "gpu_memory_gib=24")
ENGINE = "actor_infer.strategy_args.strategy_config"


def claim(plan: Plan) -> tuple[float, float]:
    """Return the bytes of the roles on device 0 that are no engines, and those of the engine's weights."""
    others = sum(sum(memory.device.values()) for name, memory in plan.memory.items() if name != "actor_infer")
    return others, plan.memory["actor_infer"].device["weights"]


@pytest.mark.parametrize(("fraction", "fits"), [(0.03, False), (0.3, True), (0.9, False)])
def test_resident_engine_leaves_the_rest(fraction: float, fits: bool) -> None:
    config, plan = planned(*STAYS, f"{ENGINE}.gpu_memory_utilization={fraction}")
    assert plan.roles["actor_infer"].devices[0] == plan.roles["actor_train"].devices[0]
    others, weights = claim(plan)
    # 0.03 of 24 GiB is less than the engine's weights and a sequence; 0.9 leaves too little for the other roles.
    room = weights + plan.memory["actor_infer"].device["kv_cache"] <= fraction * 24 * GIB
    assert fits == (room and others + fraction * 24 * GIB <= 24 * GIB)
    assert fit_line(plan, 24).startswith("It fits" if fits else "warning: too much")
    assert bool(misfits(plan, 24 * GIB)) != fits


def test_cache_in_bytes_replaces_the_fraction() -> None:
    words = (*STAYS, f"{ENGINE}.gpu_memory_utilization=0.9")
    config, plan = planned(*words, f"+{ENGINE}.engine_args.kv_cache_memory_bytes={4 * GIB}")
    others, weights = claim(plan)
    engine = plan.memory["actor_infer"]
    assert (engine.reserved_fraction, engine.reserved_bytes) == (0, weights + 4 * GIB)
    least = others + weights + 4 * GIB
    assert not misfits(plan, least)
    assert misfits(plan, least - 1)
    (line,) = [line for line in advice_lines(config, plan) if line.startswith("KV cache of actor_infer")]
    assert f"{4 * GIB // engine.device['kv_cache']:,} sequences" in line
    found = re.search(r"(\d+) are assigned .*kv_cache_memory_bytes (\d+) is enough", line)
    assert found and int(found[2]) == int(found[1]) * engine.device["kv_cache"]
    assert f"{weights / GIB + 4:.2f} GiB with the KV cache" in device_lines(plan)[0]


def test_too_small_cache_does_not_fit() -> None:
    _, plan = planned(*STAYS, f"+{ENGINE}.engine_args.kv_cache_memory_bytes={1 << 20}")
    assert misfits(plan, 1000 * GIB)


def test_engines_reserve_together() -> None:
    phase = Phase("all at once", held=10 * GIB, of_engines=4 * GIB, reserved_fraction=0.6, reserved_bytes=2 * GIB)
    assert phase.claimed(20 * GIB) == 6 * GIB + 0.6 * 20 * GIB + 2 * GIB
    assert phase.fits(20 * GIB)
    assert not phase.fits(19 * GIB)


@pytest.mark.parametrize("size", ["4G", 0, -1, True, 1.5])
def test_cache_size_must_be_bytes(size: Any) -> None:
    engine = VllmConfig.model_validate({"engine_args": {"kv_cache_memory_bytes": size}})
    role = ActorInferConfig.model_validate({"strategy_args": {"strategy_name": "vllm"}, "device_mapping": (0,)})
    faults = engine_args_faults(engine, "actor_infer.strategy_args.strategy_config", "actor_infer", role)
    assert coded(faults) == [("wrong_type", f"{ENGINE}.engine_args.kv_cache_memory_bytes")]


def test_the_fraction_without_effect_is_named() -> None:
    block = {"gpu_memory_utilization": 0.3, "engine_args": {"kv_cache_memory_bytes": GIB}}
    engine = VllmConfig.model_validate(block)
    role = ActorInferConfig.model_validate({"strategy_args": {"strategy_name": "vllm"}, "device_mapping": (0,)})
    (warning,) = vllm_warnings(engine, "actor_infer", role)
    assert warning.startswith(f"{ENGINE}.gpu_memory_utilization: has no effect")
