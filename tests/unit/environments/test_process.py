"""Environments that hang, raise, leak, die or forge replies cost at most their process, and never return a false
result.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from roll.agents.environments.base import Observation, Step
from roll.agents.environments.process import NeighbourFailed
from roll.errors import ConfigError, EnvironmentFailed
from tests import limits
from tests.unit.environments.running import KINDS, environment_children, process, says
from tests.unit.rewards.running import gone, run

pytestmark = pytest.mark.usefixtures("marks", "nothing_left_behind")
ROW = {"name": "ada"}
MIB = 1 << 20
RETURNS = {
    "no step": "step returned a str, not a Step",
    "nan": "its reward is nan, not a finite number",
    "large": "bytes as JSON; at most 4194304 are allowed",
    "many": "it has 300 messages; at most 256 are allowed",
    "no role": "a message must be a mapping with a role of",
    "object": "is not JSON serializable",
    "state": "its state must be a text of at most 65536 characters",
    "metric": "its metric 'm' is 'high', not a finite number",
}


async def failure(step: Any) -> EnvironmentFailed:
    with pytest.raises(EnvironmentFailed) as failed:
        await step
    return failed.value


@pytest.mark.parametrize("kind", KINDS)
def test_sessions_of_one_process_are_apart(kind: str, marks: Path) -> None:
    async def go() -> None:
        async with process(environment=f"worlds:{kind}", environment_args={"begin": 4}) as held:
            first, second = await held.open(1, ROW, 7), await held.open(2, {"name": None}, 8)
            assert first == Observation([{"role": "user", "content": "ada 7"}], [], "start")
            assert second.messages == [{"role": "user", "content": "None 8"}]
            expected = Step([{"role": "user", "content": "turn 5"}], 2.5, False, {"count": 5.0}, "at 5")
            assert await held.step(1, says("go")) == expected
            assert (await held.step(1, says("go"))).reward == 3.0
            assert await held.step(2, says("go")) == expected
            assert len(environment_children()) == 1
            await held.end(1)
            assert (marks / "closed 6").exists() and not (marks / "closed 5").exists()
            assert isinstance(await failure(held.step(1, says("go"))), NeighbourFailed)

    run(go())


def test_asynchronous_environments_run_side_by_side() -> None:
    """Each environment waits for the other."""

    async def go() -> tuple[Step, Step]:
        async with process(environment="worlds:Awaited") as held:
            for session, begin in ((1, "go"), (2, "hold")):
                await held.open(session, ROW, 0)
                if begin == "go":
                    await held.step(session, says("go"))
            return await asyncio.gather(held.step(1, says("meet")), held.step(2, says("meet")))

    assert [step.reward for step in run(go())] == [1.0, 0.5]


@pytest.mark.parametrize("kind", KINDS)
def test_what_raises_costs_its_own_session(kind: str, marks: Path) -> None:
    async def go() -> None:
        async with process(environment=f"worlds:{kind}", memory_gib=0.75) as held:
            await held.open(1, ROW, 0)
            children = environment_children()
            for number, (text, said) in enumerate(
                {
                    "raise": "KeyError: 'no such door'",
                    "exit": "SystemExit: enough",
                    "allocate": "; memory_gib of the domain",
                    **RETURNS,
                }.items()
            ):
                await held.open(10 + number, ROW, 0)
                failed = await failure(held.step(10 + number, says(text)))
                assert failed.reason == "crashed" and not isinstance(failed, NeighbourFailed)
                assert failed.why.startswith("step failed: ") and said in failed.why
                if text == "raise":
                    line = (marks / "worlds.py").read_text().splitlines().index(
                        '        raise KeyError("no such door")  # raise'
                    ) + 1
                    assert f"({marks / 'worlds.py'}, line {line})" in failed.why
                await held.end(10 + number)
            assert (await failure(held.open(50, {"fail": "raise"}, 0))).why.startswith("reset failed: KeyError")
            assert (await held.step(1, says("go"))).reward == 0.5
            assert environment_children() == children

    run(go())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("leave", "the process ended itself with status 3"),
        pytest.param("segfault", "the process died of SIGSEGV", marks=pytest.mark.full),
        ("forge", "its process sent an invalid reply: it does not carry the number of a call in progress"),
        ("spawn", "the process and its descendants were "),
        (f"leak {300 * MIB}", "the process and its descendants held "),
    ],
)
def test_what_costs_its_process_costs_no_more(kind: str, text: str, why: str) -> None:
    async def go() -> None:
        async with process(environment=f"worlds:{kind}", max_processes=8, memory_gib=0.75) as held:
            await held.open(1, ROW, 0)
            await held.open(2, ROW, 0)
            children = environment_children()
            failed = await failure(held.step(1, says(text)))
            assert failed.reason == "crashed" and not isinstance(failed, NeighbourFailed)
            assert failed.why.startswith(why)
            neighbour = await failure(held.step(2, says("go")))
            assert isinstance(neighbour, NeighbourFailed) and f": {why}" in neighbour.why
            await held.end(1)
            await held.end(2)
            await held.open(3, ROW, 0)
            assert (await held.step(3, says("go"))).reward == 0.5
            assert gone(children) and len(environment_children()) == 1

    run(go())


@pytest.mark.parametrize("kind", KINDS)
def test_late_synchronous_call_ends_its_process(kind: str, marks: Path) -> None:
    async def go() -> None:
        async with process(environment=f"worlds:{kind}") as held:
            for session in (1, 2):
                await held.open(session, ROW, 0)
            failed = await failure(held.step(1, says("hang")))
            assert failed.reason == "timed_out"
            assert failed.why.startswith("step ") and failed.why.endswith(f" step_timeout, {limits.CALL:g} s")
            assert gone([int((marks / "hanging").read_text())])
            assert isinstance(await failure(held.step(2, says("go"))), NeighbourFailed)

    run(go(), marks)


def test_late_asynchronous_call_ends_without_its_process(marks: Path) -> None:
    async def go() -> None:
        async with process(environment="worlds:Awaited", step_timeout=limits.EXPIRY) as held:
            for session in (1, 2):
                await held.open(session, ROW, 0)
            failed = await failure(held.step(1, says("sleep")))
            assert failed.reason == "timed_out"
            assert failed.why.startswith("step ") and failed.why.endswith(f" step_timeout, {limits.EXPIRY:g} s")
            assert not gone([int((marks / "hanging").read_text())])
            assert (await held.step(2, says("go"))).reward == 0.5

    run(go())


def test_a_process_that_is_killed_is_replaced() -> None:
    async def go() -> None:
        async with process() as held:
            await held.open(1, ROW, 0)
            [child] = environment_children()
            os.kill(child, signal.SIGKILL)
            assert (await failure(held.step(1, says("go")))).why.endswith("died of SIGKILL")
            await held.open(2, ROW, 0)
            assert (await held.step(2, says("go"))).reward == 0.5

    run(go())


def test_a_stopped_process_is_noticed_before_its_deadline() -> None:
    async def go() -> None:
        async with process(step_timeout=10 * limits.CALL) as held:
            await held.open(1, ROW, 0)
            [child] = environment_children()
            os.kill(child, signal.SIGSTOP)
            assert "SIGSTOP" in (await failure(held.step(1, says("go")))).why
            await held.open(2, ROW, 0)
            assert (await held.step(2, says("go"))).reward == 0.5

    run(go())


def test_cancelled_call_leaves_process_to_its_neighbours(marks: Path) -> None:
    async def go() -> None:
        async with process(environment="worlds:Awaited") as held:
            await held.open(1, ROW, 0)
            await held.open(2, ROW, 0)
            step = asyncio.ensure_future(held.step(1, says("sleep")))
            await limits.comes_true((marks / "hanging").exists, "the step is under way")
            step.cancel()
            await held.end(1)
            assert (marks / "closed 0").exists(), "the step was ended, and the environment closed"
            assert (await held.step(2, says("go"))).reward == 0.5

    run(go())


def test_environments_do_not_share_their_arguments() -> None:
    async def go() -> list[float]:
        async with process(environment="worlds:World", environment_args={"taken": [1]}) as held:
            rewards = []
            for session in (1, 2):
                await held.open(session, ROW, 0)
                rewards.append((await held.step(session, says("taken"))).reward)
            return rewards

    assert run(go()) == [1.0, 1.0]


def test_waiting_reset_gets_the_new_process() -> None:
    async def go() -> None:
        async with process() as held:
            await held.open(1, ROW, 0)
            leaving = asyncio.ensure_future(failure(held.step(1, says("leave"))))
            opening = asyncio.ensure_future(held.open(2, ROW, 0))
            behind = asyncio.ensure_future(failure(held.step(1, says("go"))))
            assert not isinstance(await leaving, NeighbourFailed)
            assert isinstance(await behind, NeighbourFailed)
            await opening
            assert (await held.step(2, says("go"))).reward == 0.5

    run(go())


def test_unknown_environment_is_a_configuration_fault() -> None:
    async def go() -> None:
        async with process(environment="worlds:Nothing"):
            raise AssertionError("the process has started")

    with pytest.raises(ConfigError, match="'worlds:Nothing'") as raised:
        run(go())
    assert [(fault.place, fault.code) for fault in raised.value.faults] == [
        ("environments.act.environment", "not_found")
    ]
