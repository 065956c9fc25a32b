"""How the keys reach the replay of rare successes, and what it changes elsewhere: the checkpoint and the KL loss."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from roll.algorithms.shaping import Overlong
from roll.config.derived.batch import most_replayed, plan_batch
from roll.config.derived.methods import weighs_kl
from roll.config.plan.plan import make_plan
from roll.config.plan.show import arithmetic_lines
from roll.rewards.passing import Bar
from roll.rollout.batch import Shaping
from roll.rollout.replay import FILE, GroupReplay, SavedTogether
from roll.rollout.scheduler import FILE as UNUSED
from roll.rollout.scheduler import RolloutScheduler
from roll.runs.rlvr.rare_successes import replay_of
from roll.types import Prompt, RolloutGroup
from tests.unit.rollout.build import make_episode, make_group
from tests.unit.rollout.test_curriculum_runs import Attempts

RLVR = "tiny/tiny_rlvr_lora_zero3"
BARS = {"sums": (Bar(0.8),)}
Configured = Callable[..., Any]


def group_of(prompt_id: int, rewards: Sequence[float], version: int = 0) -> RolloutGroup:
    return make_group(prompt_id, [make_episode([5], reward, versions=[version]) for reward in rewards])


def test_without_the_block_nothing_is_replayed(configured: Configured) -> None:
    assert replay_of(configured(RLVR), BARS, Shaping()) is None
    assert replay_of(configured(RLVR, "+curriculum={}"), BARS, Shaping()) is None


def test_keys_reach_the_replay(configured: Configured) -> None:
    """64 groups of a step, of which an eighth are 8. Of four responses that pass at 0.8, at most two."""
    keys = "+curriculum={replay: {solve_rate_at_most: 0.5, share: 0.125, buffer_size: 10, staleness_at_most: 5}}"
    replay = replay_of(configured(RLVR, keys), BARS, Shaping())
    assert isinstance(replay, GroupReplay)
    rare = [group_of(number, [0.8, 1.0, 0.79, 0.0]) for number in range(13)]
    others = [[0.8, 0.9, 1.0, 0.0], [0.79, 0.5, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]]
    replay.trained([*rare, *(group_of(50, rewards) for rewards in others)], 0)
    assert replay.metrics()["curriculum/buffered"] == 10 and replay.metrics()["curriculum/unreplayed"] == 3
    equal = [group_of(99, [0.0] * 4, version=5)] * 64
    assert [one.prompt.prompt_id for one in replay.trained(equal, 5)] == [*range(3, 11), *[99] * 56]
    assert replay.trained(equal, 6) == equal and replay.metrics()["curriculum/unreplayed"] == 2


def test_shaping_reaches_the_replay(configured: Configured) -> None:
    """Rewards that only a penalty for length makes different teach something."""
    shaped = Shaping(overlong=Overlong(limit=4, buffer=4))
    replay = replay_of(configured(RLVR, "+curriculum={replay: {}}"), BARS, shaped)
    assert replay is not None
    replay.trained([group_of(0, [1.0, 0.0, 0.0, 0.0])], 0)
    lengths = make_group(1, [make_episode([5] * length, 1.0) for length in (1, 2, 3, 4)])
    assert replay.trained([lengths], 0) == [lengths]


@pytest.mark.parametrize(("share", "groups", "most"), [(0.25, 64, 16), (0.29, 100, 29), (0.25, 7, 1), (1, 3, 3)])
def test_a_share_is_rounded_down(share: float, groups: int, most: int) -> None:
    assert most_replayed(share, groups) == most


def test_replayed_tokens_weigh_the_kl_loss(configured: Configured) -> None:
    """With one update per step and synchronous generation, only replayed tokens are of another policy."""
    rows = plan_batch(configured(RLVR)).sequences_per_step // 2
    words = (f"actor_train.training_args.gradient_accumulation_steps={rows}",)
    words += ("actor_train.training_args.per_device_train_batch_size=1",)
    plain, replayed = (configured(RLVR, *words, f"+curriculum={block}") for block in ("{}", "{replay: {}}"))
    assert plan_batch(plain).updates == plan_batch(replayed).updates == 1
    assert not weighs_kl(plain) and weighs_kl(replayed)


def test_the_plan_shows_the_replay(configured: Configured) -> None:
    config = configured(RLVR, "+curriculum={replay: {share: 0.125}}")
    [line] = [line for line in arithmetic_lines(config, make_plan(config)) if line.startswith("Replay")]
    assert all(value in line for value in ("at most 0.25", "0.125 of a step", "8 updates", "64"))


class Source:
    """Draws prompts numbered from 0."""

    def __init__(self) -> None:
        self.drawn = 0

    def draw(self, count: int) -> list[Prompt]:
        self.drawn += count
        return [make_group(number, []).prompt for number in range(self.drawn - count, self.drawn)]

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self.drawn}

    def load_state_dict(self, state: Any) -> None:
        self.drawn = state["drawn"]


def test_unused_and_buffered_groups_are_saved_together(configured: Configured, tmp_path: Path) -> None:
    class Fives(Attempts):
        async def sample(self, prompt: Prompt, seed: int | None) -> RolloutGroup:
            return group_of(prompt.prompt_id, [1.0, 0.0])

    async def run() -> None:
        scheduler = RolloutScheduler(Source(), Fives(), 2, 1.0, 7)
        replay = GroupReplay(lambda one: True, lambda one: True, 1, 4, 8)
        replay.trained(await scheduler.take(), 0)
        for _ in range(3):
            await asyncio.sleep(0)
        await SavedTogether(scheduler, replay).save(tmp_path)
        assert (tmp_path / FILE).exists() and (tmp_path / UNUSED).exists()
        again = GroupReplay(lambda one: True, lambda one: one.prompt.prompt_id < 9, 1, 4, 8)
        resumed = RolloutScheduler(Source(), Fives(), 2, 1.0, 7)
        resumed.load_state_dict(scheduler.state_dict())
        await SavedTogether(resumed, again).load(tmp_path)
        trained = again.trained([group_of(9, [0.0, 0.0]), *await resumed.take()], 0)
        assert [one.prompt.prompt_id for one in trained] == [0, 2, 3]
        await scheduler.aclose()
        await resumed.aclose()

    asyncio.run(run())
