"""`ActorInfer` distributes the samples of a prompt over engines with room. The result of each sample depends only on
its seed.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from roll.backend import GenerateStrategy
from roll.engines.actor_infer import ActorInfer
from roll.engines.pool import Running, running_limits
from roll.errors import RollError
from roll.ray.batching import Ranks
from roll.types import Completion, FinishReason, Ints, NumberedCompletions, Sampling, Session
from tests import limits
from tests.streams import whole

PROMPT = np.array([7, 8], np.int32)


class Group(Ranks[GenerateStrategy]):
    """Fake engines that finish a sample when its gate opens. The token ids of a completion are its seed and its
    engine.
    """

    role = "actor_infer"

    def __init__(self, engines: int) -> None:
        self.engines = engines
        self.asked: list[tuple[int, int, int | None]] = []  # engine, samples, seed
        self.running = [0] * engines
        self.gates: dict[int, asyncio.Event] = defaultdict(asyncio.Event)  # by seed of the sample
        self.fails: set[int] = set()
        self.forgets: set[int] = set()

    def __len__(self) -> int:
        return self.engines

    async def run(self, method: str, arguments: Mapping[int, tuple[Any, ...]], seconds: float) -> list[Any]:
        assert method == "cause_of_death"
        return [None] * len(arguments)

    @property
    def callers(self) -> list[Any]:
        return [SimpleNamespace(stream=partial(self.stream, rank)) for rank in range(len(self))]

    async def stream(
        self,
        engine: int,
        method: Any,
        token_ids: Ints,
        sampling: Sampling,
        seed: int | None,
        shown: object,
        seconds: float,
    ) -> AsyncGenerator[NumberedCompletions, None]:
        self.asked.append((engine, sampling.samples, seed))
        self.running[engine] += sampling.samples
        try:
            for number in range(sampling.samples):
                own = (seed or 0) + number
                await self.gates[own].wait()
                if own in self.forgets:
                    return
                if own in self.fails:
                    raise RollError(f"engine {engine} died")
                ids = np.array([own, engine], np.int32)
                yield [(number, Completion(ids, None, np.zeros_like(ids), FinishReason.STOP, ""))]
                self.running[engine] -= 1
                sampling = Sampling(1, samples=sampling.samples - 1)
        finally:
            self.running[engine] -= sampling.samples


def run(scenario: Callable[[Group, ActorInfer], Coroutine[Any, Any, None]], engines: int, most: int | None) -> None:
    async def bounded() -> None:
        group = Group(engines)
        running = Running(running_limits(engines, most, None), engines)
        async with asyncio.timeout(limits.CALL):
            await scenario(group, ActorInfer(cast(Any, group), running, limits.CALL, limits.CALL, limits.CALL))

    asyncio.run(bounded())


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def seeds(completions: list[Completion]) -> list[int]:
    return [int(completion.token_ids[0]) for completion in completions]


def test_samples_wait_for_room_and_keep_their_seeds() -> None:
    async def scenario(group: Group, actor_infer: ActorInfer) -> None:
        first = asyncio.create_task(whole(actor_infer.generate(PROMPT, Sampling(1, samples=3), 100)))
        second = asyncio.create_task(whole(actor_infer.generate(PROMPT, Sampling(1, samples=3), 200)))
        await settled()
        assert group.asked == [(0, 2, 100), (1, 1, 102), (1, 1, 200)]
        health = {"engine/healthy": 2.0, "engine/restarts": 0.0}
        assert actor_infer.metrics() == {"engine/max_running_samples": 4.0, "engine/queued_samples": 2.0} | health
        for seed in (*range(100, 103), *range(200, 203)):
            group.gates[seed].set()
        assert seeds(await first) == [100, 101, 102]
        assert seeds(await second) == [200, 201, 202]
        assert actor_infer.metrics()["engine/queued_samples"] == 0.0

    run(scenario, engines=2, most=4)


def test_ended_sample_makes_room_at_any_engine() -> None:
    async def scenario(group: Group, actor_infer: ActorInfer) -> None:
        slow = asyncio.create_task(whole(actor_infer.generate(PROMPT, Sampling(1), 0)))
        fast = asyncio.create_task(whole(actor_infer.generate(PROMPT, Sampling(1), 1)))
        waits = asyncio.create_task(whole(actor_infer.generate(PROMPT, Sampling(1), 2)))
        await settled()
        assert group.asked == [(0, 1, 0), (1, 1, 1)]
        group.gates[1].set()
        group.gates[2].set()
        assert seeds(await fast) == [1] and seeds(await waits) == [2]
        assert group.asked[2] == (1, 1, 2) and not slow.done()
        group.gates[0].set()
        assert seeds(await slow) == [0]

    run(scenario, engines=2, most=2)


def test_requests_of_a_session_go_to_one_engine() -> None:
    async def scenario(group: Group, actor_infer: ActorInfer) -> None:
        first, second = Session(), Session()
        for seed in range(6):
            group.gates[seed].set()
        for seed, session in enumerate([first, second, first, first, second]):
            busy = asyncio.create_task(whole(actor_infer.generate(PROMPT, Sampling(1), 10)))
            await settled()
            if seed == 0:
                assert group.asked[-1] == (0, 1, 10), "from now on, the other engine is less busy"
            assert seeds(await whole(actor_infer.generate(PROMPT, Sampling(1), seed, session))) == [seed]
            busy.cancel()
            await asyncio.gather(busy, return_exceptions=True)
            await settled()
        engines = {seed: engine for engine, _, seed in group.asked if seed != 10}
        assert engines[0] == engines[2] == engines[3] and engines[1] == engines[4]
        del first, second, session
        assert not len(actor_infer._homes), "a finished session is forgotten"

    run(scenario, engines=2, most=8)


def test_samples_come_as_they_end() -> None:
    async def scenario(group: Group, actor_infer: ActorInfer) -> None:
        answer = actor_infer.generate(PROMPT, Sampling(1, samples=2), 10)
        group.gates[10].set()
        [(number, completion)] = await anext(answer)
        assert (number, seeds([completion])) == (0, [10])
        group.gates[11].set()
        [(number, completion)] = await anext(answer)
        assert (number, seeds([completion])) == (1, [11])

    run(scenario, engines=1, most=None)


def test_failure_reaches_its_caller_and_frees_room() -> None:
    async def scenario(group: Group, actor_infer: ActorInfer) -> None:
        group.fails.add(0)
        group.gates[0].set()
        group.gates[5].set()
        failing = asyncio.create_task(whole(actor_infer.generate(PROMPT, Sampling(1, samples=4), 0)))
        other = asyncio.create_task(whole(actor_infer.generate(PROMPT, Sampling(1), 5)))
        with pytest.raises(RollError, match="engine 0 died"):
            await failing
        assert seeds(await other) == [5]
        await settled()
        assert group.running == [0] and actor_infer.metrics()["engine/queued_samples"] == 0.0

    run(scenario, engines=1, most=2)


def test_a_sample_that_an_engine_forgets_is_missed() -> None:
    async def scenario(group: Group, actor_infer: ActorInfer) -> None:
        group.forgets.add(1)
        for seed in range(3):
            group.gates[seed].set()
        with pytest.raises(RollError, match="actor_infer rank 0 .* 2 of its 3 samples"):
            await whole(actor_infer.generate(PROMPT, Sampling(1, samples=3), 0))

    run(scenario, engines=1, most=None)


def test_who_gives_up_leaves_nothing_waiting() -> None:
    async def scenario(group: Group, actor_infer: ActorInfer) -> None:
        given_up = asyncio.create_task(whole(actor_infer.generate(PROMPT, Sampling(1, samples=4), 0)))
        other = asyncio.create_task(whole(actor_infer.generate(PROMPT, Sampling(1), 50)))
        await settled()
        given_up.cancel()
        await asyncio.gather(given_up, return_exceptions=True)
        group.gates[50].set()
        assert seeds(await other) == [50]
        assert group.running == [0] and actor_infer.metrics()["engine/queued_samples"] == 0.0

    run(scenario, engines=1, most=2)


def test_a_session_comes_home_to_a_busier_engine() -> None:
    """Without the session, its second turn would go to the idle engine, which does not have its prefix in the cache."""

    async def scenario(group: Group, actor_infer: ActorInfer) -> None:
        session, other = Session(), Session()
        for seed in range(3):
            group.gates[seed].set()
        assert seeds(await whole(actor_infer.generate(PROMPT, Sampling(1), 0, session))) == [0]
        busy = asyncio.create_task(whole(actor_infer.generate(PROMPT, Sampling(1, samples=3), 10)))
        await settled()
        assert [engine for engine, _, _ in group.asked] == [0, 0]
        assert seeds(await whole(actor_infer.generate(PROMPT, Sampling(1), 1, session))) == [1]
        assert seeds(await whole(actor_infer.generate(PROMPT, Sampling(1), 2, other))) == [2]
        assert group.asked[2:] == [(0, 1, 1), (1, 1, 2)]
        busy.cancel()
        await asyncio.gather(busy, return_exceptions=True)

    run(scenario, engines=2, most=8)
