"""The environment `tool_use`, and the tool `python`, which runs the policy's programs in the sandbox."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from roll.agents import python_tool
from roll.agents.environments.child import Hosted
from roll.agents.environments.tool_use import ToolUse
from roll.agents.python_tool import python
from roll.agents.tools import Tools
from roll.errors import EnvironmentFailed
from roll.rewards.sandbox.bubblewrap import SandboxUnavailable
from tests.limits import CPU_EXPIRY, RUN


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(python_tool, "LIMITS", replace(python_tool.LIMITS, wall_seconds=RUN, cpu_seconds=CPU_EXPIRY))


def called(name: str, **arguments: Any) -> dict[str, Any]:
    call = {"id": "call_7", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def test_the_policy_calls_tools_until_it_answers() -> None:
    async def play() -> None:
        world = Hosted(ToolUse(), Tools([python]))
        first = await world.reset({"prompt": "What is 2 to the 100?"}, 0)
        assert first.messages == [{"role": "user", "content": "What is 2 to the 100?"}]
        assert [tool["function"]["name"] for tool in first.tools] == ["python"]
        step = await world.step(called("python", code="print(2 ** 100)"))
        assert (step.done, step.reward, step.metrics) == (False, 0.0, {"tool_errors": 0.0})
        [answer] = step.messages
        assert (answer["role"], answer["tool_call_id"], answer["content"].strip()) == (
            "tool",
            "call_7",
            "1267650600228229401496703205376",
        )
        unknown = await world.step(called("perl", code=""))
        assert (unknown.done, unknown.metrics) == (False, {"tool_errors": 1.0})
        assert unknown.messages[0]["content"].startswith("Error: ") and "'perl'" in unknown.messages[0]["content"]
        end = await world.step({"role": "assistant", "content": "1267650600228229401496703205376"})
        assert (end.done, end.reward, list(end.messages)) == (True, 0.0, [])
        await world.close()

    asyncio.run(play())


@pytest.mark.parametrize(
    ("code", "begin", "end"),
    [
        ("print('a'); 1 / 0", "a", "ZeroDivisionError: division by zero"),
        ("x = 1", "(it printed nothing)", "(it printed nothing)"),
        ("print(1", "compile error", ""),
        ("print('a' * 9000)", "aaa", "... (9001 characters)"),
        ("while True: pass", "timeout (CPU time)", ""),
        ("open('/etc/passwd')", "failed: FileNotFoundError", ""),
        ("import socket; socket.create_connection(('127.0.0.1', 1))", "failed: ", ""),
    ],
)
def test_what_the_model_is_told_of_a_program(code: str, begin: str, end: str) -> None:
    told = asyncio.run(python(code))
    assert told.startswith(begin) and told.endswith(end), told


def test_missing_sandbox_fails_episode_instead_of_tool_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*_: Any) -> None:
        raise SandboxUnavailable("no namespaces here")

    monkeypatch.setattr(python_tool, "ready", absent)
    with pytest.raises(EnvironmentFailed, match="no namespaces here"):
        asyncio.run(Hosted(ToolUse(), Tools([python])).step(called("python", code="1")))


@pytest.mark.parametrize(
    ("row", "column", "problem"),
    [
        ({"question": "?"}, None, "neither 'messages' nor 'prompt'; it has the columns question"),
        ({"prompt": "?"}, "question", "no 'question'; it has the columns prompt"),
        ({"messages": []}, None, "neither"),
        ({"messages": "[1, 2]"}, None, "neither"),
    ],
)
def test_rows_without_a_task_are_refused(row: dict[str, Any], column: str | None, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        asyncio.run(ToolUse(column).reset(row, 0))


def test_tasks_are_messages_json_text_or_text() -> None:
    conversation = [{"role": "system", "content": "s"}, {"role": "user", "content": "[u]"}]
    for column, value in (("messages", conversation), ("messages", json.dumps(conversation)), ("other", conversation)):
        assert asyncio.run(ToolUse(column).reset({column: value}, 0)).messages == conversation
    assert asyncio.run(ToolUse().reset({"prompt": "[u] and so on"}, 0)).messages == [
        {"role": "user", "content": "[u] and so on"}
    ]
