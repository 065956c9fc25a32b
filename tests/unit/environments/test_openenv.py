"""Environments on a server of OpenEnv. A server that breaks fails the episode, and no session is left open."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from roll.agents.environments.base import Observation, Step
from roll.agents.environments.checked import MOST_STATE
from roll.agents.environments.openenv import OpenEnv, result_text
from roll.agents.environments.server_session import CLOSE_SECONDS
from roll.errors import EnvironmentFailed
from tests import limits
from tests.unit.environments.openenv_server import EchoServer, observed, refused
from tests.unit.environments.running import calls, process, says

pytestmark = pytest.mark.usefixtures("nothing_left_behind")
NOBODY = "http://127.0.0.1:9"
"""An address at which nothing listens."""


def played(
    server: EchoServer, *messages: Mapping[str, Any], row: Mapping[str, Any] | None = None, **keys: Any
) -> tuple[Observation, list[Step]]:
    """Play an episode in this process, close it, and check that the server has no session."""

    async def play() -> tuple[Observation, list[Step]]:
        async with server.serving() as url:
            world = OpenEnv(base_url=url, **keys)
            try:
                return await world.reset(row or {}, 7), [await world.step(message) for message in messages]
            finally:
                await world.close()
                assert server.open == 0

    return asyncio.run(play())


def texts(seen: Sequence[Observation | Step]) -> list[str]:
    return [str(one.messages[-1]["content"]) for one in seen if one.messages]


def test_an_episode_of_texts() -> None:
    server = EchoServer()
    keys = {"action_field": "message", "observation_field": "echoed_message", "env_instruction": "Say bye."}
    first, steps = played(server, says("hello"), says("bye"), row={"level": 3}, reset_columns=["level"], **keys)
    assert texts([first, *steps]) == ["Say bye.\nReady for 7", "hello"]
    assert [(step.reward, step.done) for step in steps] == [(0.5, False), (0.3, True)]
    assert [one.state for one in (first, *steps)] == ["Ready for 7", "hello", None]
    assert server.asked[0] == {"type": "reset", "data": {"seed": 7, "level": 3}}
    assert server.asked[1:] == [
        *({"type": "step", "data": {"message": text}} for text in ("hello", "bye")),
        {"type": "close"},
    ]


def test_an_episode_of_json_actions() -> None:
    first, steps = played(EchoServer(), says('so {"message": "abc"}'), action_pattern=r"\{.*\}")
    assert texts([first, *steps]) == ['{"echoed_message": "Ready for 7"}', '{"echoed_message": "abc"}']


def test_a_text_longer_than_a_state_is_shown() -> None:
    long = "x" * (MOST_STATE + 1)
    first, _ = played(EchoServer(told={"reset": observed(echoed_message=long)}), observation_field="echoed_message")
    assert texts([first]) == [long] and first.state is None


def test_a_field_may_reach_into_another() -> None:
    first, _ = played(EchoServer(), observation_field="metadata.at")
    assert texts([first]) == ["1"]


@pytest.mark.parametrize("text", ["", "[1]", '{"message": ""}', '{"text": "a"}'])
def test_the_policy_is_told_of_unreadable_actions(text: str) -> None:
    first, [wrong, right] = played(EchoServer(), says(text), says('{"message": "abc"}'), format_penalty=-0.5)
    assert (wrong.reward, wrong.done, wrong.metrics) == (-0.5, False, {"invalid_actions": 1.0})
    assert texts([wrong])[0].endswith(f"\n{texts([first])[0]}") and wrong.state == first.state
    assert right.reward == 0.3


def test_a_field_that_the_action_lacks_fails() -> None:
    with pytest.raises(EnvironmentFailed, match="action_field"):
        played(EchoServer(), says("hello"), action_field="text")


def test_steps_without_a_reward_are_counted() -> None:
    _, [step] = played(EchoServer(told={"step": observed(None, True)}), says("{}"), observation_field="metadata.at")
    assert (step.reward, step.metrics) == (0.0, {"unrewarded_steps": 1.0})


def test_an_episode_of_tool_calls() -> None:
    server = EchoServer()
    several = calls(("add", '{"a": 1, "b": 2}'), ("sub", "{}"), ("add", "{"))
    last = calls(("add", '{"a": 9, "b": 1}'), ("add", '{"a": 0, "b": 0}'))
    first, steps = played(server, several, last, server_tools=True)
    [tool] = first.tools
    assert (tool["function"]["name"], list(tool["function"]["parameters"]["properties"])) == ("add", ["a", "b"])
    assert [message["content"].partition(":")[0] for message in steps[0].messages] == ["3", "Error", "Error"]
    assert [message["tool_call_id"] for message in steps[0].messages] == ["call-0", "call-1", "call-2"]
    assert [(step.reward, step.done, step.metrics["tool_errors"]) for step in steps] == [
        (0.5, False, 2.0),
        (0.5, True, 0.0),
    ]
    assert len(steps[1].messages) == 1, "the episode was over before the second call"


def test_a_message_without_a_call_ends() -> None:
    _, [step] = played(EchoServer(), says("done"), server_tools=True)
    assert (step.done, step.reward) == (True, 0.0)


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ({"content": [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}]}, "a\nb"),
        ({"content": []}, '{"content": []}'),
        ("plain", "plain"),
        (None, "null"),
    ],
)
def test_the_text_of_a_result(result: Any, text: str) -> None:
    assert result_text(result) == text


@pytest.mark.parametrize(
    ("told", "keys", "problem"),
    [
        ({"reset": "leave"}, {}, "has ended the session"),
        ({"step": "leave"}, {}, "has ended the session"),
        ({"step": "}"}, {}, "answer to step is malformed"),
        ({"step": {"type": "observation", "data": {}}}, {}, "answer to step is malformed"),
        ({"step": observed("1")}, {}, "answer to step is malformed"),  # type: ignore[arg-type]
        (
            {"step": {"type": "error", "data": {"code": "EXECUTION_ERROR", "message": "boom"}}},
            {},
            "EXECUTION_ERROR: boom",
        ),
        ({"reset": refused("missing", "seed", "Field required")}, {}, "VALIDATION_ERROR"),
        ({"reset": observed(done=True)}, {}, "over after reset"),
        ({}, {"observation_field": "text"}, "has no 'text'"),
        ({}, {"observation_field": "metadata.at.this"}, "has no 'metadata.at.this'"),
        ({"step": observed(tools=[], metadata={"error": "gone"})}, {"server_tools": True}, "lists no tools.*gone"),
    ],
)
def test_a_broken_server_fails_the_episode(told: Mapping[str, Any], keys: dict[str, Any], problem: str) -> None:
    with pytest.raises(EnvironmentFailed, match=problem):
        played(EchoServer(told=told), says('{"message": "a"}'), **keys)


def test_lost_tools_are_no_answer_to_the_policy() -> None:
    lost = observed(result=None, tools=[{"name": "add"}], error={"error_type": "transport_error", "message": "gone"})
    with pytest.raises(EnvironmentFailed, match="gone"):
        played(EchoServer(told={"step": lost}), calls(("add", "{}")), server_tools=True)


def test_a_full_server_says_so() -> None:
    with pytest.raises(EnvironmentFailed, match="CAPACITY_REACHED: no room"):
        played(EchoServer(room=0))


def test_closed_sessions_make_room_at_once() -> None:
    async def play() -> int:
        server = EchoServer(room=1)
        async with server.serving() as url:
            for _ in range(20):
                world = OpenEnv(base_url=url)
                await world.reset({}, 1)
                await world.close()
        return server.closed

    assert asyncio.run(play()) == 20


def test_a_key_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVER_KEY", "secret")
    server = EchoServer()
    played(server, api_key_env="SERVER_KEY")
    assert server.headers[0]["Authorization"] == "Bearer secret"


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"base_url": "127.0.0.1:8000"}, "base_url is"),
        ({"base_url": "file:///x"}, "base_url is"),
        ({"base_url": NOBODY, "action_pattern": "("}, "not a regular expression"),
        ({"base_url": NOBODY, "api_key_env": "NO_SUCH_KEY"}, "NO_SUCH_KEY"),
        ({"base_url": NOBODY, "server_tools": True, "action_field": "a"}, "action_field is 'a'"),
    ],
)
def test_unusable_keys_are_refused(keys: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        OpenEnv(**keys)


def test_sessions_of_a_process_run_side_by_side() -> None:
    async def play() -> EchoServer:
        server = EchoServer()
        async with (
            server.serving() as url,
            process(environment="openenv", environment_args={"base_url": url}) as environments,
        ):
            await asyncio.gather(*(environments.open(session, {}, session) for session in range(8)))
            steps = await asyncio.gather(
                *(environments.step(session, says('{"message": "ab"}')) for session in range(8))
            )
            assert [step.reward for step in steps] == [0.2] * 8
            await asyncio.gather(*map(environments.end, range(8)))
            limits_open = server.open
        assert limits_open == 0
        return server

    server = asyncio.run(play())
    assert (server.most, server.closed) == (8, 8)


@pytest.mark.parametrize(
    ("told", "reason"), [({"step": "leave"}, "crashed"), ({"step": "hang"}, "timed_out"), ({"close": "hang"}, "")]
)
def test_lost_and_hanging_servers_leave_nothing_open(told: Mapping[str, Any], reason: str) -> None:
    """The deadline is longer than the close of a session that the server does not end."""

    async def play() -> str:
        args = {"environment": "openenv", "step_timeout": 2 * CLOSE_SECONDS + limits.EXPIRY}
        server = EchoServer(told=told)
        async with server.serving() as url, process(environment_args={"base_url": url}, **args) as environments:
            await environments.open(0, {}, 1)
            why = ""
            try:
                await environments.step(0, says('{"message": "a"}'))
            except EnvironmentFailed as failed:
                why = failed.reason
            await environments.end(0)
            again = await environments.open(1, {}, 2)
            assert texts([again]) == ['{"echoed_message": "Ready for 2"}']
        return why

    assert asyncio.run(play()) == reason


def test_nobody_at_the_address_is_said() -> None:
    async def play() -> None:
        world = OpenEnv(base_url=NOBODY)
        with pytest.raises(EnvironmentFailed, match=f"{NOBODY}/ws does not accept"):
            await world.reset({}, 1)
        await world.close()

    asyncio.run(play())
