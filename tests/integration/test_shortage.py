"""An engine that lacks memory at its start: the user gets the error of the engine's process, with the keys to
change.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from roll.backend import GenerateStrategy
from roll.config.derived.placement import RolePlan
from roll.config.schema.model import ModelConfig
from roll.engines.vllm.settings import VllmConfig, VllmSettings
from roll.errors import EngineShortage
from roll.ray.cluster import cluster
from roll.ray.group import WorkerGroup
from roll.ray.placement import worker_placements
from tests import limits

pytestmark = [pytest.mark.engines, pytest.mark.full]


def test_an_engine_without_room_for_one_sequence(
    tiny_model: Path, tmp_path: Path, leaves_nothing: Callable[[], None]
) -> None:
    settings = VllmSettings(
        model_path=str(tiny_model),
        model_args=ModelConfig.model_validate({"dtype": "fp32"}),
        engine=VllmConfig.model_validate({"enforce_eager": True, "kv_cache_gib": 1e-5}),
        max_model_len=64,
        adapter_rank=None,
        seed=0,
        takes_turns=False,
        keeps_kv_cache=False,
    )

    async def starts(logs: Path, scratch: Path) -> None:
        places = worker_placements(RolePlan("actor_infer", "vllm", ((),)), 8, {"TMPDIR": str(scratch)})
        group: WorkerGroup[GenerateStrategy] = WorkerGroup("actor_infer", places, logs, logs / "held", blocking=False)
        try:
            await group.start(settings, limits.START, limits.START)
        finally:
            await group.stop(limits.END)

    with cluster(tmp_path, 0, 8) as session, pytest.raises(EngineShortage) as failure:
        asyncio.run(starts(session.logs, session.scratch))
    assert (failure.value.role, failure.value.rank) == ("actor_infer", 0)
    said = failure.value.cause
    assert "KV cache" in said and "kv_cache_gib" in said and "response_length" in said
    leaves_nothing()
