"""The facade of the reward workers: the choice of the worker, and the deadline of a call."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import pytest

from roll.config.schema.roles import RewardConfig
from roll.ray.batching import Ranks
from roll.ray.group import WorkerGroup
from roll.rewards.reward_workers import REPLACED, SLACK, Rewards, RewardWorker, longest
from roll.types import Prompt, RewardResult
from tests import limits

PROMPT = Prompt(0, np.zeros(1, np.int32), "", "maths", {})


class Group(Ranks[RewardWorker]):
    """Two workers that answer when `go` is set."""

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


PARTS = {"parts": {"right": {"weight": 2.0}, "brief": {"reward": "no_reward"}}}
COMPARED = {"parts": {"right": {}, "rank": {"group": True}}}


@pytest.mark.parametrize(
    ("section", "compares"),
    [({}, False), ({"group": True}, True), (PARTS, False), ({**PARTS, "normalise": "group"}, False), (COMPARED, True)],
)
def test_domain_compares_if_reward_takes_group(section: dict[str, Any], compares: bool) -> None:
    assert facade(section).compares(PROMPT) is compares


def test_group_results_combine_where_parts_are_normalised() -> None:
    results = [RewardResult(9.0, parts={"right": right, "brief": brief}) for right, brief in ((1.0, 0.0), (0.0, 0.0))]
    assert facade({}).combined(PROMPT, results) == results
    assert facade(PARTS).combined(PROMPT, results) == results
    combined = facade({**PARTS, "normalise": "group"}).combined(PROMPT, results)
    assert [result.value for result in combined] == pytest.approx([2 * 0.5**0.5, -2 * 0.5**0.5], rel=1e-5), (
        "2 (1 - 0.5) / 0.707"
    )
    assert [result.parts for result in combined] == [result.parts for result in results]


def facade(section: dict[str, Any]) -> Rewards:
    return Rewards({"maths": cast(WorkerGroup, Group())}, {"maths": RewardConfig.model_validate(section)}, limits.START)


def test_repeatable_calls_get_twice_the_time() -> None:
    once, parts = RewardConfig.model_validate({"timeout": 5.0}), RewardConfig.model_validate({"timeout": 5.0, **PARTS})
    side_by_side = RewardConfig.model_validate({"timeout": 5.0, "concurrency": 8})
    failing = 4 * (5.0 + REPLACED)
    assert [longest(section, 4) for section in (once, parts, side_by_side)] == [
        failing + SLACK,
        2 * failing + SLACK,
        2 * failing + SLACK,
    ]


def test_group_goes_to_least_busy_worker() -> None:
    async def scores() -> None:
        group = Group()
        rewards = Rewards(
            {"maths": cast(WorkerGroup, group)}, {"maths": RewardConfig.model_validate({"timeout": 5.0})}, limits.START
        )
        waiting = [asyncio.ensure_future(rewards.score(PROMPT, ["a"] * count)) for count in (4, 1, 2)]
        await asyncio.sleep(0)
        failing = 5.0 + REPLACED
        assert group.calls == [(0, 4 * failing + SLACK), (1, failing + SLACK), (1, 3 * failing + SLACK)], (
            "queued responses count"
        )
        group.go.set()
        assert [len(results) for results in await asyncio.gather(*waiting)] == [4, 1, 2]
        await rewards.score(PROMPT, ["a"])
        assert group.calls[-1] == (0, failing + SLACK), "finished calls do not count"

    asyncio.run(scores())
