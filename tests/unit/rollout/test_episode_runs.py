"""Episodes in the scheduler: broken environments are replaced, finished episodes survive a resume, and held-out tasks
are separate.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from roll.agents.environments.base import Step
from roll.agents.episode_groups import EpisodeGroups, SampledByDomain
from roll.data.prompts import FIRST_HELD_OUT, Joined, PromptSampler, Tasks
from roll.errors import EnvironmentFailed, RollError
from roll.rollout.group import SingleTurns
from roll.rollout.record import token_versions
from roll.rollout.scheduler import FILE, MOST_FAILED, RolloutScheduler, StoredGroup, read_groups, write_groups
from roll.runs.rlvr.validation import Evaluator
from roll.types import Episode, RolloutGroup, Sampling
from tests import limits
from tests.unit.rollout.build import kept_nowhere, make_prompt
from tests.unit.rollout.playing import DOMAIN, Engine, Judge, World, Worlds, episodes, groups, task, text
from tests.unit.rollout.test_episodes import DONE, run, said

BATCH = 4
BROKEN = EnvironmentFailed("it fell over")


@dataclass
class BySeed(Worlds):
    """Environments with a seed in `broken` fail whenever they are opened."""

    broken: frozenset[int] = frozenset()

    async def open(self, domain: str, row: Mapping[str, Any], seed: int) -> World:
        if seed in self.broken:
            self.seeds.append(seed)
            raise BROKEN
        return await super().open(domain, row, seed)


def fresh() -> World:
    return World([said("a"), DONE])


def saying() -> Engine:
    return Engine(lambda context: f"turn {context.count('assistant:')}")


def scheduler(sampler: EpisodeGroups, ratio: float = 0.0, **keys: Any) -> RolloutScheduler:
    return RolloutScheduler(PromptSampler(Tasks((DOMAIN,), {DOMAIN: 100}), 42), sampler, BATCH, ratio, 7, **keys)


def seeds(taken: list[RolloutGroup]) -> list[int]:
    return [group.prompt.row["seed"] for group in taken]


@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_groups_of_broken_environments_are_replaced_and_counted(ratio: float) -> None:
    drawn = [prompt.row["seed"] for prompt in PromptSampler(Tasks((DOMAIN,), {DOMAIN: 100}), 42).draw(20)]

    async def take() -> tuple[list[list[int]], list[float]]:
        worlds = BySeed(fresh, broken=frozenset({drawn[1], drawn[2], drawn[6]}))
        told: list[RolloutGroup] = []
        running = scheduler(groups(episodes(worlds, saying())), ratio, finished=told.append)
        taken, failed = [], []
        for _ in range(3):
            taken.append(await running.take())
            failed.append(running.metrics().get("episode/failed_groups", 0.0))
        await running.aclose()
        assert worlds.seeds.count(drawn[1]) == 4, "two episodes, two attempts each"
        assert not {drawn[1], drawn[2], drawn[6]} & set(seeds(told)), (
            "`finished` is not called for groups that are replaced"
        )
        return [seeds(groups) for groups in taken], failed

    taken, failed = run(take)
    left = [seed for number, seed in enumerate(drawn) if number not in (1, 2, 6)]
    assert taken == [left[:4], left[4:8], left[8:12]], (
        "groups in the order drawn, with later ones in place of the broken ones"
    )
    assert failed == [2.0, 1.0, 0.0]


def test_a_run_whose_environments_all_break_ends() -> None:
    async def take() -> None:
        running = scheduler(
            groups(episodes(BySeed(lambda: BROKEN), saying()))  # type: ignore[arg-type]
        )
        with pytest.raises(RollError, match=f"{MOST_FAILED * BATCH + 1} groups .* {DOMAIN}: {BROKEN}"):
            await running.take()
        await running.aclose()

    run(take)


def test_an_episode_may_span_updates_of_the_policy() -> None:
    """Generation runs ahead. The version increases with every answer, so each turn has its own version, which is
    recorded.
    """

    async def take() -> list[RolloutGroup]:
        running = scheduler(groups(episodes(Worlds(fresh), saying())), ratio=1.0)
        taken = await running.take()
        await running.aclose()
        return taken

    for group in run(take):
        for episode in group.episodes:
            first, second = (set(token_versions([segment]).tolist()) for segment in episode.sampled)
            assert len(first) == len(second) == 1 and max(first) < max(second)


def test_finished_episodes_are_stored_whole(tmp_path: Path) -> None:
    async def play() -> RolloutGroup:
        worlds = Worlds(
            lambda: World([Step([{"role": "user", "content": "more"}], 0.5, False, {"moves": 2.0}, "s1"), DONE])
        )
        return await groups(episodes(worlds, Engine(lambda _: "!add(1)"))).sample(task(3), 5)

    group = run(play)
    write_groups(tmp_path / FILE, {0: StoredGroup(3, 1, group.episodes, None)})
    back = read_groups(tmp_path / FILE)[0].of(task(3))
    assert text(back.prompt.token_ids) == text(group.prompt.token_ids) != ""

    def told(episode: Episode) -> list[Any]:
        segments = [
            (text(one.token_ids), one.sampled, one.text, list(one.calls)) for one in episode.trajectories[0].segments
        ]
        return [
            segments,
            list(episode.turn_rewards),
            list(episode.turn_states),
            dict(episode.metrics),
            episode.reward,
            episode.stop,
        ]

    assert [told(one) for one in back.episodes] == [told(one) for one in group.episodes]


@pytest.mark.parametrize("log_probs", [True, False])
def test_a_resumed_run_takes_what_was_finished(tmp_path: Path, log_probs: bool) -> None:
    async def take() -> None:
        before, engine = saying(), saying()
        before.takes = engine.takes = limits.NONE
        first = scheduler(groups(episodes(Worlds(fresh), before)), ratio=1.0)
        taken = await first.take()
        await limits.comes_true(
            lambda: len(before.requests) == 32, "all requests: eight groups with two episodes of two turns"
        )
        await asyncio.sleep(limits.LOOK)
        state = first.state_dict()
        await first.save(tmp_path)
        await first.aclose()

        second = scheduler(groups(episodes(Worlds(fresh), engine, log_probs=log_probs), log_probs=log_probs), ratio=1.0)
        second.load_state_dict(state)
        await second.load(tmp_path)
        others = await second.take()
        await second.aclose()
        assert not set(seeds(taken)) & set(seeds(others))
        assert all(len(group.prompt.token_ids) for group in others)
        has = {
            segment.log_probs is not None
            for group in others
            for episode in group.episodes
            for segment in episode.sampled
        }
        assert has == {log_probs}
        before_resume = {request.seed for request in before.requests}
        again = [request for request in engine.requests if request.seed in before_resume]
        assert bool(again) == (not log_probs), "stored episodes that do not match log_probs are played again"

    asyncio.run(take())


def test_domains_without_an_environment_answer_in_single_turns() -> None:
    async def both() -> tuple[RolloutGroup, RolloutGroup]:
        engine = saying()
        player = groups(episodes(Worlds(fresh), engine))
        sampler = SampledByDomain({DOMAIN: player}, SingleTurns(engine, Judge(), Sampling(20)))
        return await sampler.sample(task(), None), await sampler.sample(make_prompt(1, [65, 66]), None)

    played, single = run(both)
    assert [len(group.episodes[0].sampled) for group in (played, single)] == [2, 1]
    assert not single.episodes[0].turn_states and np.array_equal(single.prompt.token_ids, [65, 66])


def test_held_out_tasks_are_apart_and_repeat() -> None:
    tasks = Tasks((DOMAIN,), {DOMAIN: 8}, FIRST_HELD_OUT)
    prompts = [tasks.prompt(index, index) for index in range(len(tasks))]
    assert [prompt.row["seed"] for prompt in prompts] == [FIRST_HELD_OUT + n for n in range(8)]

    async def evaluate() -> tuple[dict[str, float], list[int]]:
        worlds = BySeed(fresh, broken=frozenset({FIRST_HELD_OUT}))
        sampler = groups(episodes(worlds, saying(), log_probs=False), log_probs=False)
        return await Evaluator("held", prompts, sampler, 2, 0).run(kept_nowhere), worlds.seeds

    metrics, opened = run(evaluate)
    assert metrics["val/held/pass@1"] == 7 / 8, "a broken environment does not count as passed"
    assert metrics["val/held/length_mean"] == pytest.approx(7 / 8 * 14)
    assert min(opened) >= FIRST_HELD_OUT


def test_tasks_of_several_sets_are_numbered_through() -> None:
    joined = Joined([Tasks(("a", "b"), {"b": 2}), Tasks(("a", "b"), {"a": 3, "b": 1}, 10)])
    rows = [(joined.prompt(index, 0).domain, joined.prompt(index, 0).row["seed"]) for index in range(len(joined))]
    assert rows == [("b", 0), ("b", 1), ("a", 10), ("a", 11), ("a", 12), ("b", 10)]
    assert [joined.domains[index] for index in joined.domain_index] == [domain for domain, _ in rows]
    with pytest.raises(IndexError):
        joined.prompt(6, 0)
    shares = PromptSampler(joined, 1, {"a": 1.0, "b": 1.0}).draw(6)
    assert sorted(prompt.domain for prompt in shares) == ["a"] * 3 + ["b"] * 3
