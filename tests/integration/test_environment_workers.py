"""Environments in Ray workers: sessions are distributed over the workers, and a killed worker is replaced."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from roll.agents.environment_workers import EnvironmentSettings, EnvironmentWorker, EnvironmentWorkers
from roll.agents.environments.calculator import made
from roll.config.derived.placement import RolePlan
from roll.config.schema.environments import EnvironmentConfig
from roll.errors import EnvironmentFailed
from roll.ray.cluster import cluster
from roll.ray.group import WorkerGroup
from roll.ray.placement import worker_placements
from tests import limits

pytestmark = pytest.mark.engines
ROLE = "environments.calculator"
ASKED = {"name": "calc", "arguments": '{"x": "6*7"}'}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": ASKED}]}


async def plays(folder: Path) -> None:
    section = EnvironmentConfig.model_validate(
        {"sessions_per_process": 2, "step_timeout": limits.CALL, "world_size": 2}
    )
    places = worker_placements(RolePlan(ROLE, "none", ((), ())), 8, {})
    group: WorkerGroup[EnvironmentWorker] = WorkerGroup(ROLE, places, folder, folder / "held", blocking=False)
    try:
        await group.start(EnvironmentSettings("calculator", section, limits.START), limits.START, limits.START)
        environments = EnvironmentWorkers({"calculator": group}, {"calculator": section}, limits.START)
        sessions = [await environments.open("calculator", {"seed": seed}, 0) for seed in range(4)]
        assert [session.observation.messages[0]["content"] for session in sessions] == [
            made(seed, 3, "+-*")[0] for seed in range(4)
        ]
        assert [session.malformed_calls for session in sessions] == ["answer"] * 4
        fifth = asyncio.ensure_future(environments.open("calculator", {"seed": 4}, 0))
        assert [(await session.step(CALL)).messages[0]["content"] for session in sessions] == ["42"] * 4
        assert not fifth.done(), "all sessions are in use"
        os.kill(group._pids[0], signal.SIGKILL)
        answers = await asyncio.gather(*(session.step(CALL) for session in sessions), return_exceptions=True)
        failed = [isinstance(answer, EnvironmentFailed) for answer in answers]
        assert failed == [True, False, True, False], (
            "sessions alternate between workers, and those of the other worker continue"
        )
        assert environments.metrics() == {
            "episode/crashed": 0.0,
            "episode/timed_out": 0.0,
            "episode/neighbours_lost": 2.0,
        }
        for session in sessions:
            await session.close()
        last = await fifth
        question, answer = made(4, 3, "+-*")
        assert last.observation.messages[0]["content"] == question
        assert (await last.step({"role": "assistant", "content": answer})).reward == 1.0
        await last.close()
    finally:
        await group.stop(limits.END)


def test_a_worker_that_dies_costs_its_own_episodes(tmp_path: Path, leaves_nothing: Callable[[], None]) -> None:
    with cluster(tmp_path, gpus=0, gpus_per_node=8):
        asyncio.run(plays(tmp_path))
    leaves_nothing()
