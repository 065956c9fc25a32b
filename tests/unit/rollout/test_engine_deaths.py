"""Runs in which engines die and restart at random, in virtual time: the scheduler, the engines and the sync together.

Every prompt is used once and within its staleness limit. Each sample has its own seed, and comes from an engine with
synced weights.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, cast

from roll.engines.actor_infer import ActorInfer
from roll.engines.pool import RESTARTS, Running, running_limits
from roll.errors import WorkerDied
from roll.rollout.group import SingleTurns, prompt_seed
from roll.rollout.scheduler import TRAINING, RolloutScheduler
from roll.runs.device_phases import DevicePhases
from roll.runs.rlvr.engine_sync import EngineSync
from roll.types import Prompt, RewardResult, Sampling
from roll.weight_sync.bucket import Adapter, Bucket
from roll.weight_sync.routes import MeetingPoint, Rendezvous, Route, SyncRoutes, Transport
from roll.weight_sync.sync import WeightSync
from tests import limits
from tests.tiers import each
from tests.unit.rollout.build import EachByItself, make_prompt
from tests.unit.rollout.simulated import VirtualTime
from tests.unit.workers.engines import Engines

SCHEDULES, QUICK = 1000, 200
STEPS, BATCH, SAMPLES, SEED = 4, 3, 2, 7


class Trainer:
    """Sends an adapter without a delay."""

    async def meeting_point(self, one_host: bool) -> MeetingPoint:
        return MeetingPoint("here", 1)

    async def open_routes(self, routes: SyncRoutes, rendezvous: Rendezvous | None) -> None:
        self.routes = routes

    async def send_adapter(self) -> Adapter:
        return Adapter("{}", Bucket("", (), ""))


class Schedule(EachByItself):
    """Prompts, rewards and the trainer's loop, with engines that are killed at random times."""

    def __init__(self, number: int) -> None:
        self.numbers = numbers = random.Random(number)
        self.ratio = numbers.choice([0.0, 0.0, 0.5, 1.0, 2.0])
        self.window = BATCH * numbers.choice([1, 1, 2])
        self.position = self.step = 0
        self.drawn_at: dict[int, int] = {}
        self.used: list[int] = []
        self.group = Engines(numbers.randint(1, 3), lambda seed: random.Random(seed).expovariate(0.3))
        self.group.start_seconds = lambda: numbers.uniform(0.5, 10.0)
        self.group.slow = {method: numbers.choice([0.0, 0.5]) for method in ("pause", "load_adapter", "resume")}
        self.deaths = {engine: numbers.randint(0, RESTARTS.most - 1) for engine in range(len(self.group))}
        self.group.faults = {
            engine: [numbers.choice([None, WorkerDied("actor_infer", engine, "again")])] for engine in self.deaths
        }

    def draw(self, count: int) -> list[Prompt]:
        drawn = [make_prompt(self.position + number, [self.position + number]) for number in range(count)]
        self.drawn_at |= dict.fromkeys((prompt.prompt_id for prompt in drawn), self.step)
        self.position += count
        return drawn

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.position = state["position"]

    async def score(self, prompt: Prompt, responses: Sequence[str]) -> Sequence[RewardResult]:
        await asyncio.sleep(random.Random(prompt.prompt_id).uniform(0.0, 1.0))
        return [RewardResult(1.0) for _ in responses]

    async def kill(self) -> None:
        while living := [engine for engine, left in self.deaths.items() if left]:
            await asyncio.sleep(self.numbers.expovariate(0.2))
            engine = self.numbers.choice(living)
            if self.group.is_alive(engine):
                self.group.kill(engine)
                self.deaths[engine] -= 1

    async def run(self) -> None:
        group, most = self.group, self.numbers.choice([None, 2 * len(self.group)])
        engines = ActorInfer(
            cast(Any, group),
            Running(running_limits(len(group), most, None), len(group)),
            limits.RUN,
            limits.RUN,
            limits.RUN,
        )
        routes = SyncRoutes(dict.fromkeys(range(len(group)), Route(Transport.FILE, True)), [0], 0)
        weights = WeightSync(cast(Any, Trainer()), engines.engines, lambda _: routes, True, 1, limits.CALL)
        sync = EngineSync(weights, engines, DevicePhases(cast(Any, self)), lambda _: nullcontext())
        sampling = Sampling(1, samples=SAMPLES)
        scheduler = RolloutScheduler(
            self, SingleTurns(engines, self, sampling), BATCH, self.ratio, SEED, window=self.window
        )
        killing = asyncio.create_task(self.kill())
        limit = -(-self.ratio // 1) + self.window // BATCH - 1
        await sync.push(0)
        for self.step in range(STEPS):
            async with sync.generating():
                groups = await scheduler.take()
            self.check([group.prompt.prompt_id for group in groups], limit)
            for group_ in groups:
                of = prompt_seed(SEED, TRAINING, group_.prompt.prompt_id)
                segments = [episode.trajectories[0].segments[1] for episode in group_.episodes]
                assert [segment.text for segment in segments] == [str(of), str(of + 1)]
                versions = {run.version for segment in segments for run in segment.versions}
                assert self.step - limit <= min(versions) and max(versions) <= self.step
            await asyncio.sleep(5.0)
            await sync.push(self.step + 1)
            assert all(
                group.versions[engine] == self.step + 1 for engine in engines.pool.serving if group.is_alive(engine)
            )
        killing.cancel()
        await scheduler.aclose()
        await engines.close()

    async def bring(self, needs: Any, discard: Any) -> None:
        """Do nothing, because the roles share no devices."""

    def check(self, prompts: list[int], limit: float) -> None:
        assert len(prompts) == BATCH and not set(prompts) & set(self.used)
        assert all(self.step - self.drawn_at[prompt] <= limit for prompt in prompts)
        self.used += prompts
        if self.window == BATCH:
            assert self.used == list(range(len(self.used)))


@each("start", list(range(0, SCHEDULES, QUICK)), [0])
def test_every_prompt_is_used_once_despite_deaths(start: int) -> None:
    restarts = 0
    for number in range(start, start + QUICK):
        loop, schedule = VirtualTime(), Schedule(number)
        try:
            loop.run_until_complete(schedule.run())
            assert not asyncio.all_tasks(loop) - {task for task in asyncio.all_tasks(loop) if task.done()}
        finally:
            loop.close()
        restarts += sum(schedule.group.processes)
    assert restarts > QUICK, "too few engines died for a meaningful test"
