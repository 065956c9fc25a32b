"""The replay of rare successes: which groups are replaced, by which, and what a checkpoint holds."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from roll.algorithms.shaping import Overlong
from roll.errors import CheckpointError
from roll.rollout.batch import Shaping, experience, teaches
from roll.rollout.replay import FILE, PROMPTS_FILE, GroupReplay, staleness
from roll.types import Episode, RewardOutcome, RolloutGroup, StopReason
from tests.unit.rollout.build import make_episode, make_group

RARE, EQUAL, COMMON, WRONG = [0, 0, 1, 0], [1, 1, 1, 1], [1, 1, 0, 1], [0, 0, 0, 0]


def is_rare(group: RolloutGroup) -> bool:
    rate = sum(one.reward.value > 0 for one in group.episodes) / len(group.episodes)
    return 0 < rate <= 0.25


def replay_of(**changes: Any) -> GroupReplay:
    bounds = {"most_replayed": 1, "buffer_size": 4, "staleness_at_most": 3} | changes
    return GroupReplay(is_rare, partial(teaches, shaping=Shaping()), **bounds)


def group_of(prompt_id: int, rewards: Sequence[float], version: int = 0) -> RolloutGroup:
    """Return a group whose tokens and log-probs differ from those of all other groups."""
    return make_group(
        prompt_id,
        [
            make_episode([prompt_id, sample], reward, log_probs=[-prompt_id, -sample - 0.5], versions=[version] * 2)
            for sample, reward in enumerate(rewards)
        ],
    )


def step_of(first: int, *rewards: Sequence[float], version: int = 0) -> list[RolloutGroup]:
    return [group_of(first + number, own, version) for number, own in enumerate(rewards)]


def ids(groups: Sequence[RolloutGroup]) -> list[int]:
    return [group.prompt.prompt_id for group in groups]


def test_useless_groups_give_place_to_oldest_successes() -> None:
    replay = replay_of(most_replayed=2)
    first = step_of(0, RARE, EQUAL, RARE, COMMON)
    assert replay.trained(first, 0) == first  # never in the step that was handed the group
    assert replay.metrics() == {"curriculum/replayed": 0, "curriculum/buffered": 2, "curriculum/unreplayed": 0}
    second = step_of(4, WRONG, COMMON, RARE, EQUAL, version=1)
    trained = replay.trained(second, 1)
    assert trained == [first[0], second[1], second[2], first[2]]
    told = {"curriculum/replayed": 2, "curriculum/buffered": 1, "curriculum/unreplayed": 0}
    assert replay.metrics() == told | {"curriculum/replayed_staleness": 1}
    third = step_of(8, EQUAL, EQUAL, EQUAL, EQUAL, version=2)
    assert ids(replay.trained(third, 2)) == [6, 9, 10, 11]  # a group is replayed once
    assert ids(replay.trained(third, 2)) == [8, 9, 10, 11]


def test_a_step_without_useless_groups_stays_whole() -> None:
    replay = replay_of()
    replay.trained(step_of(0, RARE, COMMON), 0)
    step = step_of(2, COMMON, RARE)
    assert replay.trained(step, 1) == step and replay.metrics()["curriculum/buffered"] == 2


def test_replayed_groups_are_at_most_their_share() -> None:
    replay = replay_of(most_replayed=1)
    replay.trained(step_of(0, RARE, RARE, RARE), 0)
    assert ids(replay.trained(step_of(3, EQUAL, WRONG, EQUAL), 1)) == [0, 4, 5]
    assert ids(replay.trained(step_of(6, COMMON, WRONG, EQUAL), 1)) == [6, 1, 8]


def test_a_full_buffer_drops_its_oldest_groups() -> None:
    replay = replay_of(buffer_size=2)
    replay.trained(step_of(0, RARE, RARE, RARE), 0)
    assert replay.metrics()["curriculum/buffered"] == 2 and replay.metrics()["curriculum/unreplayed"] == 1
    assert ids(replay.trained(step_of(3, EQUAL), 0)) == [1]


def test_stale_groups_are_dropped_and_counted() -> None:
    replay = replay_of(staleness_at_most=3)
    replay.trained(step_of(0, RARE, version=5) + step_of(1, RARE, version=6), 6)
    assert ids(replay.trained(step_of(2, EQUAL), 9)) == [1]
    assert replay.metrics()["curriculum/unreplayed"] == 1 and replay.metrics()["curriculum/replayed_staleness"] == 3


def test_staleness_is_that_of_the_oldest_token() -> None:
    group = make_group(0, [make_episode([5, 6], versions=[4, 6]), make_episode([7], versions=[6])])
    assert staleness(group, 6) == 2
    assert staleness(make_group(0, [make_episode([])]), 6) == 0


def test_a_replayed_group_keeps_its_sampling_records() -> None:
    replay = replay_of()
    replay.trained([group_of(3, RARE, version=7)], 7)
    step = experience(replay.trained([group_of(9, EQUAL, version=8), group_of(4, COMMON, version=8)], 8), Shaping())
    mask, log_probs = step.sequences.response_mask, step.behaviour_log_probs
    assert log_probs is not None
    assert step.policy_versions[mask].tolist() == [7] * 8 + [8] * 8
    assert log_probs[mask][:8].tolist() == [-3, -0.5, -3, -1.5, -3, -2.5, -3, -3.5]
    assert step.groups.tolist() == [0] * 4 + [1] * 4 and step.rewards[:4].tolist() == RARE


def test_resumed_replay_trains_on_the_same_groups(tmp_path: Path) -> None:
    kinds = [RARE, EQUAL, RARE, COMMON, WRONG, RARE, EQUAL]

    def steps(replay: GroupReplay, begin: int, end: int) -> list[Any]:
        found = []
        for number in range(begin, end):
            step = step_of(3 * number, *(kinds[(3 * number + own) % 7] for own in range(3)), version=number)
            laid = experience(replay.trained(step, number), Shaping())
            found.append((laid.sequences.token_ids.tolist(), laid.policy_versions.tolist(), laid.rewards.tolist()))
            assert laid.behaviour_log_probs is not None
            found.append((laid.behaviour_log_probs.tolist(), dict(replay.metrics())))
        return found

    async def run() -> None:
        whole, resumed = replay_of(), replay_of()
        steps(whole, 0, 5)
        assert whole.metrics()["curriculum/buffered"] > 1
        await whole.save(tmp_path)
        expected = steps(whole, 5, 20)
        assert sum(told.get("curriculum/replayed", 0) for _, told in expected[1::2]) > 5
        await resumed.load(tmp_path)
        assert steps(resumed, 5, 20) == expected

    asyncio.run(run())


def test_the_checkpoint_holds_prompts_and_episodes(tmp_path: Path) -> None:
    async def run() -> None:
        group = replace(group_of(5, RARE, version=2), baseline=make_group(5, [make_episode([8], 1.0)]).episodes[0])
        group = replace(group, prompt=replace(group.prompt, place="sums.jsonl:3", row={"ground_truth": "7"}))
        kept, read = replay_of(), replay_of()
        kept.trained([group], 2)
        await kept.save(tmp_path)
        await read.load(tmp_path)
        [found] = read.trained([group_of(6, EQUAL)], 3)
        assert found.prompt.token_ids.tolist() == group.prompt.token_ids.tolist()
        assert replace(found.prompt, token_ids=group.prompt.token_ids) == group.prompt
        assert len(found.episodes) == 4 and found.baseline is not None
        assert [part.log_probs is None for part in found.episodes[0].trajectories[0].segments] == [True, False]
        again = replay_of()
        again.trained([found], 3)  # what was read can be written again
        await again.save(tmp_path)

    asyncio.run(run())


def test_an_empty_buffer_writes_no_file(tmp_path: Path) -> None:
    async def run() -> None:
        replay = replay_of()
        await replay.save(tmp_path)
        assert not list(tmp_path.iterdir())
        replay.trained([group_of(0, RARE)], 0)
        await replay.load(tmp_path)  # a checkpoint without a buffer empties it
        assert ids(replay.trained([group_of(1, EQUAL)], 0)) == [1]

    asyncio.run(run())


@pytest.mark.parametrize("name", [FILE, PROMPTS_FILE])
def test_a_broken_file_is_named(name: str, tmp_path: Path) -> None:
    async def run() -> None:
        replay = replay_of()
        replay.trained([group_of(0, RARE)], 0)
        await replay.save(tmp_path)
        (tmp_path / name).write_text("no")
        with pytest.raises(CheckpointError, match=name):
            await replay.load(tmp_path)

    asyncio.run(run())


UNSCORED = make_episode([5], 0.0, outcome=RewardOutcome.CRASHED)
LONG = make_episode([5] * 6, 1.0)
SHORT = make_episode([5], 1.0)
CUT = make_episode([5], 0.0, stop=StopReason.LENGTH)


def test_a_group_without_verdicts_teaches_nothing() -> None:
    assert not teaches(make_group(0, [UNSCORED]), Shaping())


@pytest.mark.parametrize(
    ("episodes", "shaping", "expected"),
    [
        ([SHORT, LONG], Shaping(), False),
        ([SHORT, LONG], Shaping(overlong=Overlong(limit=6, buffer=3, factor=1.0)), True),
        ([SHORT, CUT], Shaping(), True),
        ([SHORT, UNSCORED], Shaping(), False),
        ([CUT, replace(CUT, reward=SHORT.reward)], Shaping(max_len_mask=True), False),
        ([SHORT, CUT], Shaping(difficulty=(0.6, 0.9)), False),
    ],
)
def test_what_a_comparison_learns_from(episodes: Sequence[Episode], shaping: Shaping, expected: bool) -> None:
    group = make_group(0, episodes)
    assert teaches(group, shaping) == expected
    step = experience([group], shaping)  # what the batch has of the group says the same
    assert expected == (len(np.unique(step.rewards)) > 1 and bool(step.sequences.response_mask.any()))
