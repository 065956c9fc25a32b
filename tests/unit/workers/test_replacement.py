"""A worker that dies is replaced and its calls are repeated, a bounded number of times."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, cast

import pytest

from roll.agents.environment_workers import EnvironmentWorker, EnvironmentWorkers, WorkerSession
from roll.config.schema.environments import EnvironmentConfig
from roll.config.schema.roles import RewardConfig
from roll.errors import WorkerDied, WorkerFailed, WorkerLate, WorkerStopped
from roll.ray.batching import Ranks
from roll.ray.group import WorkerGroup
from roll.ray.replacement import REPLACEMENTS, Replaced
from roll.rewards.reward_workers import Rewards
from roll.system.restart_budget import HOUR
from roll.types import RewardResult
from tests import limits
from tests.unit.rollout.build import make_prompt

SECTION = RewardConfig.model_validate({"reward": "no_reward"})


class Worker:
    async def double(self, number: int) -> int:
        """Return twice the number."""
        return 2 * number


class Group(Ranks[Any]):
    """Two ranks that raise the error, if any, that `fails(rank, method)` returns for a call or for a replacement."""

    def __init__(self, fails: Callable[[int, str], Exception | None]) -> None:
        self.fails = fails
        self.process = [0, 0]
        self.is_stopped = False
        self.asked: list[tuple[int, int, str]] = []
        """The calls: rank, number of its process, and method."""

    def __len__(self) -> int:
        return 2

    async def run(self, method: str, arguments: Mapping[int, tuple[Any, ...]], seconds: float) -> list[Any]:
        [(rank, given)] = arguments.items()
        process = self.process[rank]
        self.asked.append((rank, process, method))
        await asyncio.sleep(0)
        assert process == self.process[rank], "a call was made during a replacement"
        if error := self.fails(rank, method):
            raise error
        return [[RewardResult(1.0)] * len(given[1]) if method == "score" else 2 * given[0]]

    def check_running(self, rank: int) -> None:
        if self.is_stopped:
            raise WorkerStopped("rewards.d", rank, "its group is stopped")

    async def replace(self, rank: int, seconds: float) -> None:
        assert seconds == limits.START
        await asyncio.sleep(0)
        self.asked.append((rank, self.process[rank], "replace"))
        if error := self.fails(rank, "replace"):
            raise error
        self.process[rank] += 1


def replaced(group: Group, clock: Callable[[], float] = lambda: 0.0) -> Replaced[Worker]:
    return Replaced(cast(WorkerGroup[Worker], group), limits.START, clock)


def times(*errors: Exception | None) -> Callable[[int, str], Exception | None]:
    """Return a `fails` function that returns these errors one after another, and then None."""
    left = list(errors)
    return lambda rank, method: left.pop(0) if left else None


DIED, LATE = (
    WorkerDied("rewards.d", 1, "the process died"),
    WorkerLate("rewards.d", 1, "score did not finish within 5 s"),
)


@pytest.mark.parametrize("error", [DIED, LATE])
def test_unanswered_calls_of_dead_worker_are_repeated(error: WorkerFailed) -> None:
    group = Group(times(error))
    assert asyncio.run(replaced(group).one(1, limits.CALL, Worker.double, 4)) == 8
    assert group.asked == [(1, 0, "double"), (1, 0, "replace"), (1, 1, "double")]


def test_calls_that_one_death_failed_replace_it_once() -> None:
    async def go() -> list[int]:
        dead = {0}
        group = Group(
            lambda rank, method: DIED if method != "replace" and rank == 1 and group.process[1] in dead else None
        )
        ranks = replaced(group)
        calls = [ranks.one(rank, limits.CALL, Worker.double, number) for number, rank in enumerate([1, 1, 1, 0])]
        found = await asyncio.gather(*calls)
        assert group.process == [0, 1]
        return found

    assert asyncio.run(go()) == [0, 2, 4, 6]


def test_nothing_is_replaced_once_the_group_is_stopped(caplog: pytest.LogCaptureFixture) -> None:
    async def go() -> list[Any]:
        group = Group(lambda rank, method: DIED)
        ranks = replaced(group)
        calls = [asyncio.ensure_future(ranks.one(0, limits.CALL, Worker.double, number)) for number in range(3)]
        group.is_stopped = True
        ended = await asyncio.gather(*calls, return_exceptions=True)
        assert [method for *_, method in group.asked] == ["double"] * 3
        return ended

    assert [type(error) for error in asyncio.run(go())] == [WorkerStopped] * 3
    assert not caplog.records


def test_sessions_that_close_at_the_end_say_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async def go() -> None:
        group = Group(lambda rank, method: DIED if method == "end" else None)
        section = EnvironmentConfig.model_validate({"environment": "calculator"})
        workers = EnvironmentWorkers({"d": cast(WorkerGroup[EnvironmentWorker], group)}, {"d": section}, limits.START)
        sessions = [WorkerSession(workers._domains["d"], 0, number) for number in range(3)]
        for session in sessions:
            workers._domains["d"]._sessions.take(1)
            await session.close()
        group.is_stopped = True
        closing = [session._closing for session in sessions if session._closing]
        assert await asyncio.gather(*closing, return_exceptions=True) == [None] * 3

    asyncio.run(go())
    assert not caplog.records


def test_a_replacement_that_dies_as_it_starts_counts() -> None:
    group = Group(times(DIED, LATE, DIED))
    assert asyncio.run(replaced(group).one(1, limits.CALL, Worker.double, 4)) == 8
    assert [method for *_, method in group.asked] == ["double", *["replace"] * 3, "double"]


def test_worker_always_dying_ends_run_with_cause() -> None:
    group = Group(lambda rank, method: None if method == "replace" else DIED)
    with pytest.raises(WorkerFailed, match=f"rewards.d.*1.*the process died; .*replaced {REPLACEMENTS.most} times"):
        asyncio.run(replaced(group).one(1, limits.CALL, Worker.double, 4))
    assert group.process == [0, REPLACEMENTS.most]


def test_failures_of_earlier_hours_do_not_count() -> None:
    now = [0.0]

    async def go() -> None:
        group = Group(lambda rank, method: None)
        ranks = replaced(group, lambda: now[0])
        for _ in range(3 * REPLACEMENTS.most):
            group.fails = times(DIED)
            assert await ranks.one(1, limits.CALL, Worker.double, 4) == 8
            now[0] += HOUR / (REPLACEMENTS.most - 1)
        assert group.process == [0, 3 * REPLACEMENTS.most]

    asyncio.run(go())


def test_what_a_living_worker_raises_is_raised() -> None:
    group = Group(times(WorkerFailed("rewards.d", 1, "KeyError: 'x'")))
    with pytest.raises(WorkerFailed, match="KeyError"):
        asyncio.run(replaced(group).one(1, limits.CALL, Worker.double, 4))
    assert group.process == [0, 0]


def test_responses_of_dead_worker_are_scored_again() -> None:
    group = Group(times(DIED))
    rewards = Rewards({"maths": cast(WorkerGroup, group)}, {"maths": SECTION}, limits.START)
    prompt = make_prompt(0, domain="maths")
    assert asyncio.run(_scored(rewards, prompt)) == [RewardResult(1.0)] * 2
    assert [method for *_, method in group.asked] == ["score", "replace", "score"]


async def _scored(rewards: Rewards, prompt: Any) -> list[RewardResult]:
    return list(await rewards.score(prompt, ["a", "b"]))
