"""If judges and engines share devices, responses are judged after all of them are generated."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

from roll.ray.device_sharing import DeviceSharing, Residency
from roll.rollout.group import JudgedInTurn, SingleTurns
from roll.rollout.scheduler import RolloutScheduler
from roll.runs.device_phases import DevicePhases
from roll.runs.rlvr.validation import ByItself, Evaluator
from roll.types import Completion, FinishReason, Ints, NumberedCompletions, Prompt, RewardResult, Sampling
from tests import limits
from tests.streams import whole
from tests.unit.rollout.build import EachByItself, kept_nowhere, make_prompt

SAMPLING = Sampling(4, samples=2, log_probs=False)
ROLES = ("actor_train", "actor_infer", "rewards.first", "rewards.second")
BATCH = 6


class Device:
    """A device that all roles share. Records the onloaded roles and the moves."""

    def __init__(self) -> None:
        self.moves: list[str] = []
        self.there: set[str] = set()
        self.discards: list[tuple[str, bool]] = []
        self.sharing = DeviceSharing({role: frozenset(ROLES) - {role} for role in ROLES})

    async def enter(self) -> None:
        for role in ROLES:
            self.there.add(role)
            await self.sharing.register(role, Role(role, self))
        self.moves.clear()
        self.discards.clear()


class Role:
    """Implements `ColocatedRole`."""

    def __init__(self, name: str, device: Device) -> None:
        self.name, self.device = name, device

    async def offload(self, discard: bool) -> int | None:
        self.device.discards.append((self.name, discard))
        self.device.there.discard(self.name)
        return None

    async def onload(self, level: Residency) -> None:
        await asyncio.sleep(0)
        self.device.there.add(self.name)
        self.device.moves.append(self.name)
        assert len(self.device.there) == 1, "two roles are onloaded at the same time"


class Engine:
    """Implements `Generator`. Prompts are not answered in the order of the calls."""

    def __init__(self, device: Device) -> None:
        self.device, self.calls = device, 0

    async def generate(
        self, token_ids: Ints, sampling: Sampling, seed: int | None = None, shown: object = None
    ) -> AsyncGenerator[NumberedCompletions, None]:
        self.calls += 1
        for _ in range(100 - 5 * (self.calls % BATCH)):
            assert self.device.there == {"actor_infer"}
            await asyncio.sleep(0)
        one = Completion(np.array([1], np.int32), None, np.zeros(1, np.int32), FinishReason.STOP, "text")
        yield list(enumerate([one] * sampling.samples))


class Judges(EachByItself):
    """Implements `Scorer`. Checks that the judge of a domain is onloaded while it scores."""

    def __init__(self, device: Device, judged: Sequence[str]) -> None:
        self.device, self.judged = device, judged
        self.most = self.open = 0

    async def score(self, prompt: Prompt, responses: Sequence[str]) -> Sequence[RewardResult]:
        self.open += 1
        self.most = max(self.most, self.open)
        for _ in range(10):
            if prompt.domain in self.judged:
                assert self.device.there == {f"rewards.{prompt.domain}"}
            await asyncio.sleep(0)
        self.open -= 1
        return [RewardResult(1.0)] * len(responses)


class Source:
    """Implements `PromptSource`: domains alternate."""

    def __init__(self, domains: Sequence[str]) -> None:
        self.domains, self.drawn = domains, 0

    def draw(self, count: int) -> list[Prompt]:
        first, self.drawn = self.drawn, self.drawn + count
        return [
            make_prompt(number, domain=self.domains[number % len(self.domains)]) for number in range(first, self.drawn)
        ]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None: ...


@pytest.mark.parametrize(
    ("domains", "moves"),
    [
        (["first"], ["actor_infer", "rewards.first"]),
        (["first", "plain"], ["actor_infer", "rewards.first"]),
        (["plain"], ["actor_infer"]),
    ],
)
def test_two_moves_a_rollout(domains: list[str], moves: list[str]) -> None:
    async def run() -> None:
        device = Device()
        await device.enter()
        phases = DevicePhases(device.sharing)
        judged = ["first", "second"]
        judges = Judges(device, judged)
        both = JudgedInTurn(
            Engine(device),
            judges,
            {name: partial(phases.judging, f"rewards.{name}") for name in judged},
            phases.generation,
        )
        scheduler = RolloutScheduler(Source(domains), SingleTurns(both, both, SAMPLING), BATCH, 0.0, None)
        for _ in range(3):
            await phases.generation()
            groups = await scheduler.take()
            assert len(groups) == BATCH and all(
                episode.reward.value == 1.0 for group in groups for episode in group.episodes
            )
            await phases.training("actor_train")
        assert device.moves == [*moves, "actor_train"] * 3
        assert judges.most > 1, "the responses of a phase are judged at the same time"
        await phases.generation()
        held_out = [make_prompt(number, domain=domains[0]) for number in range(4)]
        await Evaluator("held", held_out, SingleTurns(both, ByItself(both), SAMPLING), SAMPLING.samples, 0).run(
            kept_nowhere
        )
        assert device.moves[-len(moves) :] == moves
        await scheduler.aclose()

    asyncio.run(asyncio.wait_for(run(), limits.CALL))


def test_two_models_judge_one_after_the_other() -> None:
    async def run() -> None:
        device = Device()
        await device.enter()
        phases = DevicePhases(device.sharing)
        judged = ["first", "second"]
        judging = {name: partial(phases.judging, f"rewards.{name}") for name in judged}
        both = JudgedInTurn(Engine(device), Judges(device, judged), judging, phases.generation)
        scheduler = RolloutScheduler(Source(judged), SingleTurns(both, both, SAMPLING), BATCH, 0.0, None)
        await phases.generation()
        await scheduler.take()
        assert device.moves[0] == "actor_infer" and sorted(device.moves[1:]) == ["rewards.first", "rewards.second"]
        await scheduler.aclose()

    asyncio.run(asyncio.wait_for(run(), limits.CALL))


def test_generation_waits_for_time_shared_judge() -> None:
    async def run() -> None:
        device = Device()
        await device.enter()
        phases = DevicePhases(device.sharing)
        both = JudgedInTurn(
            Engine(device),
            Judges(device, ["first"]),
            {"first": partial(phases.judging, "rewards.first")},
            phases.generation,
        )
        prompt = make_prompt(0, domain="first")
        await phases.generation()
        await whole(both.generate(prompt.token_ids, SAMPLING))
        scoring = asyncio.create_task(both.score(prompt, ["a"]))
        while device.there != {"rewards.first"}:
            await asyncio.sleep(0)
        await whole(both.generate(prompt.token_ids, SAMPLING))
        assert device.discards == [("actor_infer", False), ("rewards.first", False)], (
            "no sync would restore discarded weights"
        )
        assert scoring.done() and device.moves == ["actor_infer", "rewards.first", "actor_infer"]

    asyncio.run(asyncio.wait_for(run(), limits.CALL))


def test_a_failure_lets_the_others_go_on() -> None:
    async def run() -> None:
        device = Device()
        await device.enter()
        phases = DevicePhases(device.sharing)
        both = JudgedInTurn(
            Engine(device),
            Judges(device, ["first"]),
            {"first": partial(phases.judging, "rewards.first")},
            phases.generation,
        )
        prompt = make_prompt(0, domain="first")
        await phases.generation()
        generating = asyncio.create_task(whole(both.generate(prompt.token_ids, SAMPLING)))
        scoring = asyncio.create_task(both.score(prompt, ["a"]))
        await asyncio.sleep(0)
        generating.cancel()
        assert [result.value for result in await scoring] == [1.0]

    asyncio.run(asyncio.wait_for(run(), limits.CALL))
