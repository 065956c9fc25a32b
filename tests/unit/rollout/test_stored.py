"""Finished groups in a checkpoint are read as they were written, and a resumed run does not generate them again."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from roll.errors import CheckpointError
from roll.rollout.group import SingleTurns
from roll.rollout.scheduler import FILE, RolloutScheduler, StoredGroup, read_groups, write_groups
from roll.types import (
    Completion,
    Episode,
    FinishReason,
    Ints,
    NumberedCompletions,
    PartnerTurn,
    RewardOutcome,
    RewardResult,
    RolloutGroup,
    Sampling,
    Segment,
    StopReason,
    Trajectory,
    TurnReward,
    VersionRun,
)
from tests.unit.rollout.build import make_prompt
from tests.unit.rollout.simulated import World


def segment(numbers: np.random.Generator, sampled: bool) -> Segment:
    length = int(numbers.integers(0, 6))
    first = int(numbers.integers(0, length + 1))
    runs = tuple(run for run in (VersionRun(3, first), VersionRun(5, length - first)) if run.tokens) if sampled else ()
    log_probs = numbers.normal(size=length).astype(np.float32) if sampled else None
    token_ids = numbers.integers(0, 2**31 - 1, length).astype(np.int32)
    routes = numbers.integers(-1, 9, (length, 3, 2)).astype(np.int16) if numbers.random() < 0.5 else None
    return Segment(token_ids, sampled, log_probs, runs, "é\n" * length, routes=routes)


def episode(numbers: np.random.Generator) -> Episode:
    paths = [
        Trajectory([segment(numbers, sampled=bool(number % 2)) for number in range(int(numbers.integers(2, 5)))], stop)
        for stop in numbers.choice(np.array(list(StopReason)), int(numbers.integers(1, 3)))
    ]
    reward = RewardResult(
        float(numbers.normal()), RewardOutcome.TIMED_OUT, {"format": 0.1}, "late", (TurnReward(2, 1 / 3),)
    )
    heard = (PartnerTurn(1, "rival", "é"), PartnerTurn(1, "critic", ""))[: len(paths)]
    return Episode(
        [replace(path, stop=StopReason(path.stop)) for path in paths], reward, (0.25, 1e-300), partner_turns=heard
    )


def plain(value: Any) -> Any:
    """Convert dataclasses, arrays and sequences to values that can be compared."""
    if isinstance(value, np.ndarray):
        return (str(value.dtype), value.tolist())
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    return {name: plain(one) for name, one in vars(value).items()} if hasattr(value, "__dataclass_fields__") else value


def test_groups_are_read_as_they_were_written(tmp_path: Path) -> None:
    numbers = np.random.default_rng(0)
    groups = {
        number: StoredGroup(
            100 + number, number % 3, [episode(numbers) for _ in range(4)], episode(numbers) if number % 2 else None
        )
        for number in (0, 1, 2, 7)
    }
    write_groups(tmp_path / FILE, groups)
    found = read_groups(tmp_path / FILE)
    assert found.keys() == groups.keys()
    for number, group in groups.items():
        assert plain(found[number]) == plain(group)


@pytest.mark.parametrize(
    "spoil", [lambda content: b"", lambda content: content[: len(content) // 2], lambda content: b"{}" + content]
)
def test_a_spoilt_file_is_named(tmp_path: Path, spoil: Any) -> None:
    write_groups(tmp_path / FILE, {0: StoredGroup(0, 0, [episode(np.random.default_rng(1))], None)})
    (tmp_path / FILE).write_bytes(spoil((tmp_path / FILE).read_bytes()))
    with pytest.raises(CheckpointError, match=FILE):
        read_groups(tmp_path / FILE)


def test_a_group_of_another_prompt_is_refused() -> None:
    with pytest.raises(CheckpointError, match="prompt 4, but prompt 5"):
        StoredGroup(4, 0, [], None).of(make_prompt(5))


class Engine(World):
    """Answers at once, except for every fourth prompt, which waits for `release`. Records the requested prompts."""

    def __init__(self) -> None:
        super().__init__([])
        self.asked: list[int] = []
        self.release = asyncio.Event()

    async def generate(
        self, token_ids: Ints, sampling: Sampling, seed: int | None = None, shown: object = None
    ) -> AsyncGenerator[NumberedCompletions, None]:
        prompt_id = int(token_ids[0])
        self.asked.append(prompt_id)
        if prompt_id % 4 == 3:
            await self.release.wait()
        ids = np.array([prompt_id, self.version], np.int32)
        log_probs = np.zeros(2, np.float32) if sampling.log_probs else None
        yield list(
            enumerate(
                [Completion(ids, log_probs, np.full(2, self.version, np.int32), FinishReason.STOP, "")]
                * sampling.samples
            )
        )

    async def score(self, prompt: Any, responses: Sequence[str]) -> Sequence[RewardResult]:
        return [RewardResult(float(n)) for n in range(len(responses))]


def scheduler(
    engine: Engine, finished: Callable[[RolloutGroup], None] | None = None, **sampling: Any
) -> RolloutScheduler:
    sampler = SingleTurns(engine, engine, Sampling(8, samples=2, **sampling))
    return RolloutScheduler(engine, sampler, 4, 1.0, 7, window=8, finished=finished)


def told(groups: Sequence[RolloutGroup]) -> list[list[int]]:
    """Return the two tokens of the first sample of each group: the id of the prompt, and the policy version."""
    return [group.episodes[0].sampled[0].token_ids.tolist() for group in groups]


@pytest.mark.parametrize(("log_probs", "again"), [(True, [3, 7]), (False, [3, 5, 6, 7])])
def test_what_was_finished_is_not_generated_again(tmp_path: Path, log_probs: bool, again: list[int]) -> None:
    async def run() -> None:
        before = Engine()
        first = scheduler(before)
        assert told(await first.take()) == [[0, 0], [1, 0], [2, 0], [4, 0]]
        await asyncio.sleep(0)
        state = first.state_dict()
        await first.save(tmp_path)
        await first.aclose()
        assert sorted(before.asked) == list(range(8))

        after = Engine()
        after.version = 1
        after.release.set()
        heard: list[RolloutGroup] = []
        second = scheduler(after, heard.append, log_probs=log_probs)
        second.load_state_dict(state)
        await second.load(tmp_path)
        groups = await second.take()
        stored = 0 if log_probs else 1
        assert told(groups) == [[3, 1], [5, stored], [6, stored], [7, 1]]
        assert [number for number in after.asked if number < 8] == again
        assert all(sum(one is group for one in heard) == 1 for group in groups), (
            "stored groups are also passed to `finished`"
        )
        await second.aclose()

    asyncio.run(run())


def test_nothing_is_written_where_nothing_waits(tmp_path: Path) -> None:
    async def run() -> None:
        engine = Engine()
        engine.release.set()
        synchronous = RolloutScheduler(engine, SingleTurns(engine, engine, Sampling(8, samples=2)), 4, 0.0, 7)
        await synchronous.take()
        await synchronous.save(tmp_path)
        await synchronous.load(tmp_path)

    asyncio.run(run())
    assert not list(tmp_path.iterdir())


def test_stored_groups_keep_their_ages(tmp_path: Path) -> None:
    """Group 1 is at the age limit, so it goes before group 0, which is as finished. Saved again, group 0 is as old as
    it was.
    """

    async def run() -> list[StoredGroup]:
        engine = Engine()
        sampler = SingleTurns(engine, engine, Sampling(8, samples=2))
        done = [await sampler.sample(make_prompt(number, [number]), None) for number in range(2)]
        limit = 2  # a ratio of 1 and a window of two batches
        ages = {0: limit - 1, 1: limit}
        write_groups(
            tmp_path / FILE, {number: StoredGroup(number, ages[number], done[number].episodes, None) for number in ages}
        )
        resumed = RolloutScheduler(engine, sampler, 1, 1.0, 7, window=2)
        await resumed.load(tmp_path)
        assert [group.prompt.prompt_id for group in await resumed.take()] == [1]
        (tmp_path / "again").mkdir()
        await resumed.save(tmp_path / "again")
        await resumed.aclose()
        return list(read_groups(tmp_path / "again" / FILE).values())

    assert [(group.prompt_id, group.age) for group in asyncio.run(run())] == [(0, 2)]


def test_groups_of_earlier_versions_have_no_partners(tmp_path: Path) -> None:
    write_groups(tmp_path / FILE, {0: StoredGroup(0, 0, [episode(np.random.default_rng(1))], None)})
    arrays = load_file(tmp_path / FILE)
    told = json.loads(arrays["groups"].tobytes())
    del told[0]["episodes"][0]["partner_turns"]
    save_file(arrays | {"groups": np.frombuffer(json.dumps(told).encode(), np.uint8)}, tmp_path / FILE)
    [found] = read_groups(tmp_path / FILE)[0].episodes
    assert found.partner_turns == () and found.turn_rewards == [0.25, 1e-300]
