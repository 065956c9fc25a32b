"""Samples are scored as soon as they end, in any order, and each keeps its own reward."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

import numpy as np
import pytest

from roll.errors import RollError
from roll.rollout.group import SingleTurns
from roll.types import Completion, FinishReason, Ints, NumberedCompletions, Prompt, RewardResult, Sampling
from tests import limits
from tests.unit.rollout.build import EachByItself, make_prompt

ORDER = (2, 0, 3, 1)


class Engine:
    """Ends samples in the order `ORDER`, one for each item in `steps`."""

    def __init__(self) -> None:
        self.steps: asyncio.Queue[None] = asyncio.Queue()
        self.fails = self.closed = False

    async def generate(
        self, token_ids: Ints, sampling: Sampling, seed: int | None = None, shown: object = None
    ) -> AsyncGenerator[NumberedCompletions, None]:
        try:
            for number in ORDER[: sampling.samples]:
                await self.steps.get()
                if self.fails:
                    raise RollError("the engine died")
                ids = np.array([number], np.int32)
                yield [(number, Completion(ids, None, np.zeros(1, np.int32), FinishReason.STOP, str(number)))]
        finally:
            self.closed = True


class Rewards(EachByItself):
    """Rewards a response with its number, as soon as `may_score` is set."""

    def __init__(self) -> None:
        self.scored: list[list[str]] = []
        self.given_up = 0
        self.may_score = asyncio.Event()

    async def score(self, prompt: Prompt, responses: Sequence[str]) -> Sequence[RewardResult]:
        self.scored.append(list(responses))
        try:
            await self.may_score.wait()
        except asyncio.CancelledError:
            self.given_up += 1
            raise
        return [RewardResult(float(response)) for response in responses]


def test_samples_are_scored_while_others_are_drawn() -> None:
    async def run() -> None:
        engine, rewards = Engine(), Rewards()
        async with asyncio.timeout(limits.CALL):
            group = asyncio.create_task(
                SingleTurns(engine, rewards, Sampling(1, samples=4)).sample(make_prompt(0), None)
            )
            for number in range(3):
                engine.steps.put_nowait(None)
                while len(rewards.scored) <= number:
                    await asyncio.sleep(0)
            assert rewards.scored == [["2"], ["0"], ["3"]] and not group.done()
            engine.steps.put_nowait(None)
            rewards.may_score.set()
            episodes = (await group).episodes
        assert [episode.reward.value for episode in episodes] == [0.0, 1.0, 2.0, 3.0]
        assert [episode.sampled[0].text for episode in episodes] == ["0", "1", "2", "3"]

    asyncio.run(run())


def test_a_failure_gives_up_what_is_being_scored() -> None:
    async def run() -> None:
        engine, rewards = Engine(), Rewards()
        async with asyncio.timeout(limits.CALL):
            group = asyncio.create_task(
                SingleTurns(engine, rewards, Sampling(1, samples=4)).sample(make_prompt(0), None)
            )
            engine.steps.put_nowait(None)
            while not rewards.scored:
                await asyncio.sleep(0)
            engine.fails = True
            engine.steps.put_nowait(None)
            with pytest.raises(RollError, match="the engine died"):
                await group
            await asyncio.sleep(0)
        assert rewards.given_up == 1 and engine.closed

    asyncio.run(run())
