"""The scheduler with a curriculum: which groups are measured, arrival order, and resuming."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from roll.config.schema.curriculum import CurriculumConfig
from roll.data.curriculum import Curriculum, CurriculumSampler
from roll.data.prompts import Tasks
from roll.rollout.filters import usable
from roll.rollout.scheduler import RolloutScheduler
from roll.types import Episode, Prompt, RolloutGroup, StopReason
from tests.unit.rollout.build import make_episode

TASKS = Tasks(("sums",), {"sums": 40})
BATCH = 4


class Attempts:
    """A sampler with two attempts at each prompt. Rewards depend on the prompt and on when it is drawn."""

    def __init__(self, turns: Callable[[int], int] = lambda prompt_id: 0, fails: Sequence[int] = ()) -> None:
        """`turns` is how often the event loop turns before a group is finished; `fails`, ids with a broken world."""
        self._turns, self._fails = turns, fails

    async def sample(self, prompt: Prompt, seed: int | None) -> RolloutGroup:
        for _ in range(self._turns(prompt.prompt_id)):
            await asyncio.sleep(0)
        number = prompt.row["seed"]
        stop = StopReason.ENVIRONMENT_FAILED if prompt.prompt_id in self._fails else StopReason.COMPLETED
        rewards = [float(number % 3 > 0), float((number + prompt.prompt_id // 50) % 3 > 1)]
        return RolloutGroup(prompt, [make_episode([5], reward, stop=stop) for reward in rewards])

    def yields(self, prompt: Prompt, episodes: Sequence[Episode], baseline: Episode | None) -> bool:
        return True


def mean_reward(group: RolloutGroup) -> float | None:
    episodes = usable(group)
    return sum(one.reward.value for one in episodes) / len(episodes) if episodes else None


def run_of(sampler: Attempts, ratio: float = 0.0, **settings: Any) -> tuple[RolloutScheduler, Curriculum]:
    curriculum = Curriculum(TASKS, 1, CurriculumConfig.model_validate({}), mean_reward)
    source = CurriculumSampler(TASKS, curriculum)
    return RolloutScheduler(source, sampler, BATCH, ratio, 7, observer=curriculum, **settings), curriculum


async def steps(scheduler: RolloutScheduler, count: int) -> list[Any]:
    """Return what each step trains on, and its metrics."""
    found = []
    for _ in range(count):
        groups = await scheduler.take()
        taken = [(group.prompt.prompt_id, group.prompt.row["seed"], mean_reward(group)) for group in groups]
        found.append((taken, dict(scheduler.metrics())))
    return found


RUNS: list[tuple[float, dict[str, Any]]] = [
    (0.0, {}),
    (1.5, {}),
    (0.5, {"most_batches": 3}),
    (1.0, {"window": 12}),
]


@pytest.mark.parametrize(("ratio", "settings"), RUNS)
def test_resumed_run_trains_on_the_same_prompts(ratio: float, settings: dict[str, Any], tmp_path: Path) -> None:
    async def run() -> None:
        whole, _ = run_of(Attempts(), ratio, **settings)
        await steps(whole, 13)
        state = json.dumps(whole.state_dict())
        await whole.save(tmp_path)
        expected = await steps(whole, 25)
        await whole.aclose()
        resumed, _ = run_of(Attempts(), ratio, **settings)
        resumed.load_state_dict(json.loads(state))
        await resumed.load(tmp_path)
        assert await steps(resumed, 25) == expected
        await resumed.aclose()
        fresh, _ = run_of(Attempts(), ratio, **settings)
        assert (await steps(fresh, 13 + 25))[13:] == expected
        await fresh.aclose()

    asyncio.run(run())


def test_resume_after_groups_handed_over_out_of_order() -> None:
    """Slow groups stay behind in a wide window: the resumed run draws their prompts again, and skips the others."""

    def slow(prompt_id: int) -> int:
        return 40 if prompt_id % 5 == 0 else 0

    async def run() -> None:
        whole, curriculum = run_of(Attempts(slow), 1.0, window=12)
        while not (state := json.loads(json.dumps(whole.state_dict())))["window"]["gone"]:
            await steps(whole, 1)
        before = curriculum.state_dict()
        await whole.aclose()
        resumed, again = run_of(Attempts(), 1.0, window=12)
        resumed.load_state_dict(state)
        [(taken, _)] = await steps(resumed, 1)
        journal = dict(before["drawn"])
        assert [prompt_id for prompt_id, _, _ in taken] == before["in_flight"][:BATCH]
        assert all(journal[prompt_id] == number for prompt_id, number, _ in taken)
        # Nothing is measured twice or forgotten: each prompt in flight is one that the scheduler still has.
        after = max(journal) + 1
        assert again.state_dict()["in_flight"] == [*before["in_flight"][BATCH:], *range(after, after + BATCH)]
        await resumed.aclose()

    asyncio.run(run())


def test_arrival_order_does_not_change_the_draws() -> None:
    async def run(turns: Callable[[int], int]) -> list[Any]:
        scheduler, _ = run_of(Attempts(turns), 1.0)
        found = await steps(scheduler, 30)
        await scheduler.aclose()
        return found

    assert asyncio.run(run(lambda prompt_id: 0)) == asyncio.run(run(lambda prompt_id: (7 * prompt_id) % 11))


def test_groups_that_a_filter_drops_are_measured() -> None:
    async def run() -> None:
        scheduler, curriculum = run_of(Attempts(), most_batches=10)
        [(taken, metrics)] = await steps(scheduler, 1)
        state = curriculum.state_dict()
        assert metrics["sampling/dropped_groups"] > 0
        assert len(state["prompts"]) == metrics["sampling/drawn_groups"] > len(taken)
        expected = [{0: 0.0, 1: 0.5, 2: 1.0}[number % 3] for number in state["prompts"]]
        assert state["rates"] == expected and state["in_flight"] == []
        await scheduler.aclose()

    asyncio.run(run())


def test_group_of_a_broken_environment_frees_its_prompt() -> None:
    async def run() -> None:
        scheduler, curriculum = run_of(Attempts(fails=[1, 2]))
        [(taken, metrics)] = await steps(scheduler, 1)
        assert [prompt_id for prompt_id, _, _ in taken] == [0, 3, 4, 5] and metrics["episode/failed_groups"] == 2
        state = curriculum.state_dict()
        assert len(state["prompts"]) == 6 and state["rates"].count(None) == 2 and state["in_flight"] == []
        await scheduler.aclose()

    asyncio.run(run())


def test_a_step_has_no_prompt_twice() -> None:
    async def run() -> None:
        scheduler, _ = run_of(Attempts(), 2.0)
        for taken, metrics in await steps(scheduler, 60):
            assert len({number for _, number, _ in taken}) == BATCH
            assert metrics["curriculum/repeated"] == 0
        await scheduler.aclose()

    asyncio.run(run())
