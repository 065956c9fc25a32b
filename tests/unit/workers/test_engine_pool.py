"""Engines that die are restarted, and their requests continue on other engines. The tests run in virtual time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, cast

import numpy as np
import pytest

from roll.backend import EngineActivity, GenerateStrategy
from roll.engines.actor_infer import ActorInfer
from roll.engines.pool import MOST_LATE, PROBE_EVERY, RESTARTS, Running, running_limits
from roll.errors import DataError, EngineShortage, Fault, RollError, WorkerDied, WorkerFailed, WorkerLate
from roll.ray.device_sharing import Residency
from roll.rewards.judges.reward_models import JudgeEngines
from roll.types import Completion, Sampling
from roll.weight_sync.bucket import Bucket
from tests import limits
from tests.streams import whole
from tests.unit.rollout.simulated import VirtualTime
from tests.unit.workers.engines import Engines

BUCKET = Bucket("bucket", (), "")

PROMPT = np.array([7, 8], np.int32)
Scenario = Callable[[Engines, ActorInfer], Coroutine[Any, Any, None]]


def run(scenario: Scenario, group: Engines, most: int | None = None, kind: type[ActorInfer] = ActorInfer) -> None:
    async def closed() -> None:
        may_run = Running(running_limits(len(group), most, None), len(group))
        engines = kind(cast(Any, group), may_run, limits.CALL, limits.CALL, limits.CALL)
        await scenario(group, engines)
        await engines.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}, "a task was left behind"

    loop = VirtualTime()
    try:
        loop.run_until_complete(closed())
    finally:
        loop.close()


def drawn(completions: list[Completion]) -> list[tuple[int, ...]]:
    """Return the seed, engine and process of each sample."""
    return [tuple(completion.token_ids.tolist()) for completion in completions]


def by_seed(seed: int) -> float:
    return float(seed)


async def back(engines: ActorInfer, engine: int) -> None:
    """Wait until an engine has restarted, and mark it as having weights."""
    await engines.pool.until(lambda: engine in engines.pool.stale)
    engines.pool.have_weights([engine])


def test_unfinished_samples_restart_elsewhere_with_their_seeds() -> None:
    async def scenario(group: Engines, engines: ActorInfer) -> None:
        answer = asyncio.ensure_future(whole(engines.generate(PROMPT, Sampling(1, samples=5), 10)))
        await asyncio.sleep(12.5)
        group.kill(0)
        assert drawn(await answer) == [(10, 0, 0), (11, 0, 0), (12, 0, 0), (13, 1, 0), (14, 1, 0)]
        assert group.asked[:2] == [(0, "generate", (5, 10)), (1, "generate", (2, 13))]
        assert asyncio.get_running_loop().time() == pytest.approx(12.5 + 14), (
            "the unfinished samples were started again"
        )

    run(scenario, Engines(2, by_seed))


def test_gaps_are_filled_and_nothing_is_drawn_twice() -> None:
    async def scenario(group: Engines, engines: ActorInfer) -> None:
        answer = asyncio.ensure_future(whole(engines.generate(PROMPT, Sampling(1, samples=6), 10)))
        await asyncio.sleep(1.5)
        group.kill(0)  # samples 1, 3 and 5 have ended
        assert [own for own, _, _ in drawn(await answer)] == list(range(10, 16))
        assert group.asked[1:] == [(1, "generate", (1, 10)), (1, "generate", (1, 12)), (1, "generate", (1, 14))]

    run(scenario, Engines(2, lambda seed: 1.0 if seed % 2 else 2.0))


def test_what_is_asked_anew_goes_before_younger_prompts() -> None:
    async def scenario(group: Engines, engines: ActorInfer) -> None:
        answers = [asyncio.ensure_future(whole(engines.generate(PROMPT, Sampling(1), 10 * n))) for n in range(1, 5)]
        await asyncio.sleep(5)
        group.kill(0)
        await asyncio.gather(*answers)
        assert [given[1] for _, _, given in group.asked] == [10, 20, 10, 30, 40]

    run(scenario, Engines(2, by_seed), most=2)


def test_only_engine_serves_again_once_it_has_weights(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(group: Engines, engines: ActorInfer) -> None:
        answer = asyncio.ensure_future(whole(engines.generate(PROMPT, Sampling(1, samples=2), 10)))
        await asyncio.sleep(1)
        group.kill(0)
        await engines.pool.until(lambda: engines.pool.stale == [0])
        assert engines.metrics() == {"engine/queued_samples": 2.0, "engine/healthy": 0.0, "engine/restarts": 1.0}
        assert engines.waits and engines.pool.present == {0: 1}
        engines.pool.have_weights([0])
        assert drawn(await answer) == [(10, 0, 1), (11, 0, 1)]
        assert engines.metrics()["engine/healthy"] == 1.0

    with caplog.at_level(logging.WARNING):
        run(scenario, Engines(1, by_seed))
    died, back = caplog.messages
    assert died == "actor_infer rank 0 died: process 0 died. It restarts (1 of 5)"
    assert back.startswith("actor_infer rank 0 is back after ")


def test_restarted_judge_serves_immediately() -> None:
    async def scenario(group: Engines, engines: ActorInfer) -> None:
        answer = asyncio.ensure_future(whole(engines.generate(PROMPT, Sampling(1), 10)))
        await asyncio.sleep(1)
        group.kill(0)
        assert drawn(await answer) == [(10, 0, 1)]

    run(scenario, Engines(1, by_seed), kind=JudgeEngines)


def test_last_engine_retiring_ends_the_run() -> None:
    async def scenario(group: Engines, engines: ActorInfer) -> None:
        for _ in range(RESTARTS.most):
            engines.pool.report_dead(0, "it stands still")
            engines.pool.report_dead(0, "known")
            await back(engines, 0)
        engines.pool.report_dead(0, "it stands still")
        await asyncio.sleep(10)
        assert engines.pool.serving == [1] and engines.pool.restarts == RESTARTS.most and engines.pool.failure is None
        answer = asyncio.ensure_future(whole(engines.generate(PROMPT, Sampling(1), 10)))
        group.faults = {1: [WorkerDied("actor_infer", 1, f"death {number}") for number in range(RESTARTS.most)]}
        await asyncio.sleep(1)
        group.kill(1)
        said = "^actor_infer rank 1: .* 5 times, .*: death 4$"
        for waiting in (answer, engines.pool.until(lambda: False), whole(engines.generate(PROMPT, Sampling(1), 10))):
            with pytest.raises(WorkerDied, match=said):
                await waiting

    run(scenario, Engines(2, by_seed))


def fatal(exception: str) -> str:
    """Return what vLLM's engine process prints when it ends with an exception."""
    return (
        f"x\n(EngineCore pid=7) ERROR 11-25 11:19:03 [core.py:1512] EngineCore encountered a fatal "
        f"error.\n{exception}\n"
    )


def test_engine_dying_twice_of_first_request_ends_run(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(group: Engines, engines: ActorInfer) -> None:
        group.log[0] = fatal("RuntimeError: no kernel")
        answer = asyncio.ensure_future(whole(engines.generate(PROMPT, Sampling(1), 10)))
        await asyncio.sleep(1)
        group.kill(0)
        await back(engines, 0)
        await asyncio.sleep(1)
        group.kill(0)
        said = r"^actor_infer rank 0: on host 10\.0\.0\.0, .*twice .*: RuntimeError: no kernel;"
        for waiting in (answer, engines.pool.until(lambda: False)):
            with pytest.raises(WorkerDied, match=said):
                await waiting
        assert engines.pool.restarts == 1

    with caplog.at_level(logging.WARNING):
        run(scenario, Engines(1, lambda seed: limits.RUN))
    first, _, last = caplog.messages
    assert "RuntimeError: no kernel; " in first and "process 0 died" in first and "(1 of 5)" in first
    assert "is not restarted again" in last


def test_engine_dying_twice_of_a_fault_is_hopeless() -> None:
    async def scenario(group: Engines, engines: ActorInfer) -> None:
        for number in range(2):
            engines.pool.report_dead(0, f"vLLM's engine process died of SIGILL (log {number})")
            await asyncio.sleep(10)
        with pytest.raises(WorkerDied, match="rank 0: on host 10.0.0.0, .*twice .* died of SIGILL"):
            await engines.pool.until(lambda: False)
        assert engines.pool.restarts == 1

    run(scenario, Engines(1, by_seed))


def test_hopeless_engine_leaves_requests_to_others() -> None:
    async def scenario(group: Engines, engines: ActorInfer) -> None:
        for number in range(2):
            await asyncio.sleep(1)
            group.log[0] = fatal(f"RuntimeError: fault at 0x{number}f")
            engines.pool.report_dead(0, f"process {number} died")
            if not number:
                await back(engines, 0)
        await asyncio.sleep(10)
        assert (engines.pool.serving, engines.pool.restarts, engines.pool.failure) == ([1], 1, None)
        assert drawn(await whole(engines.generate(PROMPT, Sampling(1), 10))) == [(10, 1, 0)]
        for _ in range(RESTARTS.most):
            engines.pool.report_dead(1, "killed")
            await back(engines, 1)
        engines.pool.report_dead(1, "killed")
        with pytest.raises(WorkerDied, match="rank 0: on host 10.0.0.0, .*: RuntimeError: fault at 0x0f;"):
            await engines.pool.until(lambda: False)

    run(scenario, Engines(2, by_seed))


@pytest.mark.parametrize(
    ("exceptions", "answers"),
    [(["KeyError: 1", "OSError: 1", "ValueError"], False), (["ValueError"] * 3, True), ([None] * 3, False)],
    ids=["unlike", "answered", "killed"],
)
def test_other_early_deaths_are_healed(exceptions: list[str | None], answers: bool) -> None:
    async def scenario(group: Engines, engines: ActorInfer) -> None:
        if answers:
            await whole(engines.generate(PROMPT, Sampling(1), 1))
        for exception in exceptions:
            group.log[0] = fatal(exception) if exception else ""
            engines.pool.report_dead(0, "process 0 died")
            await back(engines, 0)
        assert engines.pool.serving == [0] and engines.pool.restarts == 3

    run(scenario, Engines(1, by_seed))


def test_restart_failing_like_first_death_is_last() -> None:
    async def scenario(group: Engines, engines: ActorInfer) -> None:
        group.faults = {0: [WorkerFailed("actor_infer", 0, "OSError: no kernel (process 12)")]}
        group.log[0] = fatal("OSError: no kernel (process 11)")
        engines.pool.report_dead(0, "process 0 died")
        with pytest.raises(WorkerDied, match=r"twice .*: OSError: no kernel"):
            await engines.pool.until(lambda: False)
        assert engines.pool.restarts == 1

    run(scenario, Engines(1, by_seed))


@pytest.mark.parametrize(
    "fault",
    [
        DataError(Fault("pretrain", "it cannot be read", "give another", "unreadable")),
        EngineShortage("actor_infer", 0, "too little memory"),
    ],
    ids=["bad input", "shortage"],
)
def test_unrepeatable_restart_failure_ends_run(fault: RollError) -> None:
    async def scenario(group: Engines, engines: ActorInfer) -> None:
        group.faults = {0: [WorkerFailed("actor_infer", 0, "something odd"), fault]}
        answer = asyncio.ensure_future(whole(engines.generate(PROMPT, Sampling(1), 10)))
        engines.pool.report_dead(0, "it stands still")
        with pytest.raises(type(fault)) as raised:
            await answer
        assert raised.value is fault and engines.pool.restarts == 2

    run(scenario, Engines(2, lambda seed: limits.RUN))


def test_late_request_moves_once_then_ends_run() -> None:
    class Slow(Engines):
        async def stream(self, engine: int, *given: Any, **named: Any) -> Any:
            if engine == 0:
                raise WorkerLate(self.role, engine, "generate was not done")
            async for ended in super().stream(engine, *given, **named):
                yield ended

    async def once(group: Engines, engines: ActorInfer) -> None:
        assert drawn(await whole(engines.generate(PROMPT, Sampling(1), 1))) == [(1, 1, 0)]
        assert (engines.pool.serving, engines.pool.suspect) == ([0, 1], [0])
        engines.pool.answered(0)
        assert engines.pool.suspect == []

    async def again(group: Engines, engines: ActorInfer) -> None:
        with pytest.raises(WorkerLate):
            await whole(engines.generate(PROMPT, Sampling(1), 1))

    async def in_a_row(group: Engines, engines: ActorInfer) -> None:
        for _ in range(MOST_LATE):
            engines.pool.report_late(0, WorkerLate(group.role, 0, "generate was not done"))
        assert engines.pool.serving == []

    run(once, Slow(2))
    run(again, Slow(1))
    run(in_a_row, Slow(1))


def test_engine_dying_in_collective_call_is_excluded() -> None:
    async def scenario(group: Engines, engines: ActorInfer) -> None:
        group.slow = {"pause": 1.0}
        pausing = asyncio.ensure_future(engines.pause())
        await asyncio.sleep(0.5)
        group.kill(1)
        await pausing
        assert list(engines.pool.present) == [0, 2]
        assert await engines.activity() == [
            EngineActivity(1.0, 1, 1),
            EngineActivity(0.0, 0, 0),
            EngineActivity(1.0, 1, 1),
        ]
        with pytest.raises(WorkerDied, match="actor_infer rank 1: it is restarting"):
            await engines.pool.one(1, limits.CALL, GenerateStrategy.pause)
        await back(engines, 1)
        await engines.pause()
        assert [engine for engine, method, _ in group.asked if method == "pause"] == [0, 1, 2, 0, 1, 2]

    run(scenario, Engines(3))


def test_idle_engine_is_replaced_if_dead_not_late() -> None:
    class Late(Engines):
        async def _answer(self, engine: int, method: str, given: tuple[Any, ...]) -> Any:
            if method == "cause_of_death" and engine == 1:
                raise WorkerLate(self.role, engine, "cause_of_death was not done")
            return await super()._answer(engine, method, given)

    async def scenario(group: Engines, engines: ActorInfer) -> None:
        engines.pool.begin_probes()
        await asyncio.sleep(3 * PROBE_EVERY + 1)
        assert engines.pool.serving == [0, 1]
        group.kill(0)
        await asyncio.sleep(PROBE_EVERY + 2)
        assert engines.pool.serving == [1] and engines.pool.stale == [0] and group.processes == [1, 0]
        assert {method for _, method, _ in group.asked} == {"cause_of_death"}

    run(scenario, Late(2))


def test_restart_waits_for_sync_and_free_devices() -> None:
    async def scenario(group: Engines, engines: ActorInfer) -> None:
        with engines.pool.in_sync():
            group.kill(0)
            await engines.pause()
            await asyncio.sleep(10)
            assert group.processes == [0, 0]
        await engines.pool.until(lambda: 0 in engines.pool.stale)
        assert group.processes == [1, 0]

        engines.pool.report_dead(1, "it stands still")
        await asyncio.sleep(0.5)
        await engines.offload(discard=True)
        assert group.processes == [1, 1], "offload waits for a restart in progress"
        engines.pool.report_dead(1, "it stands still")
        await engines.onload(Residency.WEIGHTS)
        await asyncio.sleep(10)
        assert group.processes == [1, 1], "another role may be on the device together with the weights"
        await engines.onload(Residency.WHOLE)
        await engines.pool.until(lambda: 1 in engines.pool.stale)

    run(scenario, Engines(2))


def test_death_amid_sync_fails_calls_of_the_sync() -> None:
    async def scenario(group: Engines, engines: ActorInfer) -> None:
        group.slow = {"load_bucket": limits.RUN}  # vLLM never answers a call once its own process has died
        with engines.pool.in_sync():
            loading = asyncio.ensure_future(engines.pool.one(0, limits.RUN, GenerateStrategy.load_bucket, BUCKET))
            await asyncio.sleep(1)
            engines.pool.report_dead(0, "vLLM's engine process died")
            await asyncio.sleep(1)
            assert loading.done() and isinstance(loading.exception(), WorkerDied)
            assert group.processes == [0, 0], "the restart itself waits for the end of the sync"

    run(scenario, Engines(2))


def test_other_failures_are_raised_unchanged() -> None:
    class Odd(Engines):
        async def _answer(self, engine: int, method: str, given: tuple[Any, ...]) -> Any:
            if method == "pause":
                raise WorkerFailed(self.role, engine, "ValueError: odd")
            return self.said if method == "cause_of_death" else None

        said: str | None = None

    async def scenario(group: Engines, engines: ActorInfer) -> None:
        assert isinstance(group, Odd)
        with pytest.raises(WorkerFailed, match="^actor_infer rank 0: ValueError: odd$"):
            await engines.pause()
        assert engines.pool.serving == [0]
        group.said = "its other process died"
        await engines.pause()
        assert engines.pool.serving == []

    run(scenario, Odd(1))


def test_an_earlier_processs_failure_spares_the_new_one() -> None:
    async def scenario(group: Engines, engines: ActorInfer) -> None:
        process = engines.pool.process(0)
        group.kill(0)
        await engines.pause()
        await back(engines, 0)
        for late in (WorkerDied(group.role, 0, "process 0 died"), WorkerFailed(group.role, 0, "its connection closed")):
            found = await engines.pool.explained(0, process, late)
            assert isinstance(found, WorkerDied), "whoever asked the earlier process must ask again"
            assert engines.pool.serving == [0] and engines.pool.restarts == 1 and group.processes == [1]
        current = await engines.pool.explained(0, engines.pool.process(0), WorkerDied(group.role, 0, "process 1 died"))
        assert isinstance(current, WorkerDied) and engines.pool.serving == []

    run(scenario, Engines(1))


def test_an_earlier_processs_probe_spares_the_new_one() -> None:
    class Slow(Engines):
        def __init__(self) -> None:
            super().__init__(1)
            self.answers = asyncio.Event()

        async def _answer(self, engine: int, method: str, given: tuple[Any, ...]) -> Any:
            if method == "cause_of_death" and not self.processes[engine]:
                await self.answers.wait()
                raise WorkerDied(self.role, engine, "process 0 died")
            return await super()._answer(engine, method, given)

    async def scenario(group: Engines, engines: ActorInfer) -> None:
        assert isinstance(group, Slow)
        engines.pool.begin_probes()
        await asyncio.sleep(PROBE_EVERY + 1)
        engines.pool.report_dead(0, "it stands still")
        await back(engines, 0)
        group.answers.set()
        await asyncio.sleep(PROBE_EVERY + 1)
        assert engines.pool.serving == [0] and engines.pool.restarts == 1 and group.processes == [1]

    run(scenario, Slow())


class Answering:
    """Servers of engines, which answer once their event is set."""

    def __init__(self, engines: int) -> None:
        self.events = [asyncio.Event() for _ in range(engines)]

    async def __call__(self, engine: int) -> None:
        await self.events[engine].wait()


def run_servers(engines: int, scenario: Callable[[Engines, ActorInfer, Answering], Coroutine[Any, Any, None]]) -> None:
    """Run a scenario on engines that are servers outside the run."""

    async def closed() -> None:
        group, answering = Engines(engines, by_seed), Answering(engines)
        may_run = Running(None, engines)
        infer = ActorInfer(cast(Any, group), may_run, limits.CALL, limits.CALL, limits.CALL, answering)
        await scenario(group, infer, answering)
        await infer.close()

    loop = VirtualTime()
    try:
        loop.run_until_complete(closed())
    finally:
        loop.close()


def test_server_leaves_and_returns_more_often_than_engines() -> None:
    async def scenario(group: Engines, engines: ActorInfer, answering: Answering) -> None:
        for times in range(RESTARTS.most + 2):
            answering.events[0].clear()
            group.kill(0)
            engines.pool.report_dead(0, "does not answer")
            await asyncio.sleep(10 * limits.CALL)
            assert engines.pool.serving == [1] and group.processes[0] == times, "it returned without an answer"
            answering.events[0].set()
            await back(engines, 0)
            assert engines.pool.serving == [0, 1]
        assert engines.pool.failure is None

    run_servers(2, scenario)


def test_run_fails_when_no_server_is_left() -> None:
    async def scenario(group: Engines, engines: ActorInfer, answering: Answering) -> None:
        for engine in (0, 1):
            group.kill(engine)
            engines.pool.report_dead(engine, "does not answer")
        await asyncio.sleep(limits.CALL / 2)
        assert engines.pool.failure is None, "one may return within the deadline of a start"
        await asyncio.sleep(limits.CALL)
        assert isinstance(engines.pool.failure, WorkerLate)

    run_servers(2, scenario)
