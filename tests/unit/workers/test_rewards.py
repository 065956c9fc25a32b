"""The facade of the reward workers: who scores, and how long it may take."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, cast

import numpy as np

from roll.config.schema.roles import RewardConfig
from roll.types import Prompt, RewardResult
from roll.workers.calls import Ranks
from roll.workers.group import WorkerGroup
from roll.workers.rewards import REPLACED, SLACK, Rewards, RewardWorker

PROMPT = Prompt(0, np.zeros(1, np.int32), "", "maths", {})


class Group(Ranks[RewardWorker]):
    """Two workers that answer when they are told to."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, float]] = []
        self.go = asyncio.Event()

    def __len__(self) -> int:
        return 2

    async def run(self, method: str, arguments: Mapping[int, tuple[Any, ...]], seconds: float) -> list[Any]:
        [(rank, (_, responses))] = arguments.items()
        self.calls.append((rank, seconds))
        await self.go.wait()
        return [[RewardResult(1.0) for _ in responses]]


def test_a_group_goes_to_the_least_busy_worker_and_has_time_for_each_response_to_fail() -> None:
    async def scores() -> None:
        group = Group()
        rewards = Rewards({"maths": cast(WorkerGroup, group)}, {"maths": RewardConfig.model_validate({"timeout": 5.0})})
        waiting = [asyncio.ensure_future(rewards.score(PROMPT, ["a"] * count)) for count in (4, 1, 2)]
        await asyncio.sleep(0)
        failing = 5.0 + REPLACED
        assert group.calls == [(0, 4 * failing + SLACK), (1, failing + SLACK), (1, 3 * failing + SLACK)], "what waits before it counts"
        group.go.set()
        assert [len(results) for results in await asyncio.gather(*waiting)] == [4, 1, 2]
        await rewards.score(PROMPT, ["a"])
        assert group.calls[-1] == (0, failing + SLACK), "what is answered waits no more"

    asyncio.run(scores())
