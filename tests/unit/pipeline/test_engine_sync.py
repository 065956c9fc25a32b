"""Weight sync while engines die, with engines on the trainer's devices and on devices of their own. In virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import nullcontext
from typing import Any, cast

import numpy as np
import pytest

from roll.engines.actor_infer import ActorInfer
from roll.engines.pool import RESTARTS, Running
from roll.errors import RollError, WorkerDied
from roll.ray.device_sharing import DeviceSharing, Residency
from roll.runs.device_phases import DevicePhases
from roll.runs.rlvr.engine_sync import EngineSync
from roll.types import Sampling
from roll.weight_sync.bucket import Adapter, Bucket
from roll.weight_sync.routes import MeetingPoint, Rendezvous, Route, SyncRoutes, Transport
from roll.weight_sync.sync import WeightSync
from tests import limits
from tests.streams import whole
from tests.unit.rollout.simulated import VirtualTime
from tests.unit.workers.engines import Engines

PROMPT = np.array([7, 8], np.int32)


class Trainer:
    """Sends an adapter. It must be onloaded to do so."""

    def __init__(self, group: Engines) -> None:
        self.group, self.level = group, Residency.WHOLE
        self.sent, self.dies = 0, False

    async def meeting_point(self, one_host: bool) -> MeetingPoint:
        return MeetingPoint("here", 1)

    async def open_routes(self, routes: SyncRoutes, rendezvous: Rendezvous | None) -> None:
        pass

    async def send_adapter(self) -> Adapter:
        assert self.level is Residency.WHOLE, "the trainer sends while it is offloaded"
        if self.dies:
            raise WorkerDied("actor_train", 0, "the process died")
        self.sent += 1
        return Adapter("{}", Bucket("", (), ""))

    async def offload(self, discard: bool) -> int | None:
        self.level = Residency.AWAY
        return None

    async def onload(self, level: Residency) -> None:
        self.level = level


class OnSharedDevices(Engines):
    """Engines that share devices with the trainer: the trainer must be offloaded while an engine starts."""

    trainer: Trainer

    async def replace(self, engine: int, seconds: float) -> None:
        assert self.trainer.level is Residency.AWAY, "an engine starts while the trainer is onloaded"
        await super().replace(engine, seconds)
        assert self.trainer.level is Residency.AWAY, "the trainer was onloaded during the start of an engine"


class Run:
    """An `EngineSync` with its engines, trainer and phases."""

    def __init__(self, group: Engines, shared: bool) -> None:
        self.group = group
        self.engines = ActorInfer(cast(Any, group), Running(None, len(group)), limits.RUN, limits.RUN, limits.RUN)
        self.trainer = Trainer(group)
        roles = ("actor_infer", "actor_train")
        self.sharing = DeviceSharing(
            {role: {other for other in roles if other != role} for role in roles} if shared else {}
        )
        self.phases = DevicePhases(self.sharing)
        routes = SyncRoutes(dict.fromkeys(range(len(group)), Route(Transport.FILE, True)), [0], 0)
        weights = WeightSync(cast(Any, self.trainer), self.engines.engines, lambda _: routes, True, 1, limits.CALL)
        self.sync = EngineSync(weights, self.engines, self.phases, lambda _: nullcontext())

    async def begin(self) -> None:
        await self.sharing.register("actor_infer", self.engines)
        await self.sharing.register("actor_train", self.trainer)
        await self.step(0)

    async def step(self, version: int) -> None:
        await self.phases.training("actor_train")
        await asyncio.sleep(1.0)
        await self.phases.sync()
        await self.sync.push(version)

    async def answers(self, samples: int) -> list[tuple[int, ...]]:
        """Generate samples, and return (seed, engine, number of the engine's process) for each."""
        await self.phases.generation()
        async with self.sync.generating():
            found = await whole(self.engines.generate(PROMPT, Sampling(1, samples=samples), 10))
        return [tuple(one.token_ids.tolist()) for one in found]


def run(scenario: Callable[[Run], Coroutine[Any, Any, None]], engines: int, shared: bool) -> None:
    async def closed() -> None:
        group = OnSharedDevices(engines, float) if shared else Engines(engines, float)
        parts = Run(group, shared)
        if isinstance(group, OnSharedDevices):
            group.trainer = parts.trainer
        await parts.begin()
        await scenario(parts)
        await parts.engines.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}, "some tasks were not finished or cancelled"

    loop = VirtualTime()
    try:
        loop.run_until_complete(closed())
    finally:
        loop.close()


SHARED = pytest.mark.parametrize("shared", [False, True], ids=["own devices", "shared devices"])


@SHARED
def test_only_engine_is_synced_amid_the_rollout(shared: bool) -> None:
    async def scenario(parts: Run) -> None:
        await parts.step(1)
        answering = asyncio.ensure_future(parts.answers(2))
        await asyncio.sleep(5)
        parts.group.kill(0)
        assert await answering == [(10, 0, 1), (11, 0, 1)]
        assert parts.group.versions == [1] and parts.trainer.sent == 3
        await parts.step(2)
        assert parts.group.versions == [2] and await parts.answers(1) == [(10, 0, 1)]

    run(scenario, 1, shared)


@SHARED
def test_returned_engine_joins_the_next_sync(shared: bool) -> None:
    async def scenario(parts: Run) -> None:
        answering = asyncio.ensure_future(parts.answers(4))
        await asyncio.sleep(5)
        parts.group.kill(0)
        assert {engine for _, engine, _ in await answering} == {1}
        assert parts.engines.pool.stale == [0] and parts.trainer.sent == 1, (
            "the other engine serves, so no sync is needed yet"
        )
        await parts.step(1)
        assert parts.engines.pool.serving == [0, 1] and parts.group.versions == [1, 1] and parts.trainer.sent == 2

    run(scenario, 2, shared)


@SHARED
@pytest.mark.parametrize("method", ["pause", "load_adapter", "resume", "offload", "onload"])
@pytest.mark.parametrize("engines", [1, 2])
def test_a_death_amid_a_sync_or_a_move(shared: bool, method: str, engines: int) -> None:
    async def scenario(parts: Run) -> None:
        parts.group.slow = {method: 2.0}
        stepping = asyncio.ensure_future(parts.step(1))
        before = len([1 for _, asked, _ in parts.group.asked if asked == method])
        while not stepping.done() and len([1 for _, asked, _ in parts.group.asked if asked == method]) == before:
            await asyncio.sleep(0.25)
        parts.group.kill(engines - 1)
        await stepping
        assert await parts.answers(1)
        await parts.step(2)
        assert await parts.answers(1)
        await parts.step(3)
        assert parts.engines.pool.serving == list(range(engines)) and parts.group.versions == [3] * engines
        assert parts.engines.pool.restarts == 1 and parts.group.processes[-1] == 1

    run(scenario, engines, shared)


@SHARED
def test_engines_stay_after_a_trainers_death_amid_sync(shared: bool) -> None:
    """One of two engines does not answer, and is replaced alone."""

    async def scenario(parts: Run) -> None:
        parts.trainer.dies = True
        with pytest.raises(WorkerDied, match="actor_train"):
            await parts.step(1)
        assert await parts.sync.abandon() and parts.group.processes == [0, 0]
        asked = [engine for engine, method, _ in parts.group.asked if method == "abandon_update"]
        assert asked == [0, 1]
        parts.trainer.dies = False
        await parts.step(1)
        assert parts.group.versions == [1, 1] and parts.engines.pool.restarts == 0
        parts.group.refuses = {1: RollError("vLLM failed to load the weights")}
        assert await parts.sync.abandon()
        parts.group.refuses = {}
        await parts.phases.generation()
        await asyncio.sleep(10)
        await parts.step(2)
        assert parts.group.processes == [0, 1] and parts.group.versions == [2, 2]

    run(scenario, 2, shared)


@SHARED
def test_sync_without_any_engine_raises_the_cause(shared: bool) -> None:
    async def scenario(parts: Run) -> None:
        parts.group.faults = {0: [WorkerDied("actor_infer", 0, f"death {number}") for number in range(RESTARTS.most)]}
        parts.group.kill(0)
        with pytest.raises(RollError, match="died again: death 4$"):
            await parts.step(1)

    run(scenario, 1, shared)


def test_failed_or_cancelled_work_leaves_nothing_waiting() -> None:
    async def scenario(parts: Run) -> None:
        with pytest.raises(RollError, match="the reward failed"):
            async with parts.sync.generating():
                raise RollError("the reward failed")
        waiting = asyncio.ensure_future(parts.answers(1))
        await asyncio.sleep(1)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert not parts.engines.waits

    run(scenario, 2, shared=False)


def test_a_rollout_ends_after_the_sync_amid_it() -> None:
    async def scenario(parts: Run) -> None:
        parts.group.slow = {"resume": 2.0}
        syncs = parts.trainer.sent
        parts.group.kill(0)
        async with parts.sync.generating():
            answering = asyncio.ensure_future(whole(parts.engines.generate(PROMPT, Sampling(1), 10)))
            while parts.trainer.sent == syncs:
                await asyncio.sleep(0.25)
        assert parts.engines.pool.serving == [0] and parts.group.versions == [0]
        await answering

    run(scenario, 1, shared=False)
