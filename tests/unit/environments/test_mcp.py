"""Tools of MCP servers in addition to an environment's own, with a real server over pipes and over HTTP."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from mcp.types import CallToolResult

from roll.agents.environments.base import Observation, Step
from roll.agents.environments.process import EnvironmentProcess
from roll.agents.mcp_tools import result_text
from roll.errors import EnvironmentFailed
from tests import limits
from tests.unit.environments.running import calls, says, section
from tests.unit.rewards.running import run

SERVER = Path(__file__).with_name("mcp_server.py")
COMMAND = (sys.executable, str(SERVER))


def domain(*servers: dict[str, Any], **others: Any) -> EnvironmentProcess:
    """Return the process of `calculator`, a plain environment with its own tool. The servers' tools are added to it."""
    named = {
        "environment": "calculator",
        "mcp": tuple({"call_timeout": limits.CALL, **server} for server in servers),
        **others,
    }
    return EnvironmentProcess("act", section(**named), limits.START)


def played(process: EnvironmentProcess, *messages: dict[str, Any]) -> tuple[Observation, list[Step]]:
    async def go() -> tuple[Observation, list[Step]]:
        try:
            first = await process.open(0, {"question": "1+1=", "answer": "2"}, 0)
            return first, [await process.step(0, message) for message in messages]
        finally:
            await process.close()

    return run(go())


def contents(step: Step) -> Sequence[Any]:
    return [message["content"] for message in step.messages]


def test_mcp_tools_are_called_beside_own_tools() -> None:
    asked = calls(("double", '{"number": 21}'), ("calc", '{"x": "2*3"}'), ("double", '{"number": 4}'))
    first, [step, last] = played(domain({"command": COMMAND}), asked, says("2"))
    names = [tool["function"]["name"] for tool in first.tools]
    assert names == ["calc", "double", "whoami", "falls", "waits", "ends"]
    double = first.tools[1]["function"]
    assert (
        double["description"] == "Double a number."
        and double["parameters"]["properties"]["number"]["type"] == "integer"
    )
    assert sorted(contents(step)) == ["42", "6", "8"] and [message["tool_call_id"] for message in step.messages] == [
        "call-0",
        "call-2",
        "call-1",
    ]
    assert last.done and last.reward == 1


def test_failing_tool_returns_its_error_to_model() -> None:
    asked = calls(("falls", '{"number": 3}'), ("double", '{"number": "x"}'), ("double", '{"number": 1}'))
    _, [step] = played(domain({"command": COMMAND}), asked)
    fell, unfit, right = contents(step)
    assert fell.startswith("Error:") and "no 3 here" in fell and unfit.startswith("Error:") and right == "2"
    assert step.metrics == {"tool_errors": 2.0}


def test_late_tool_call_is_reported_to_model() -> None:
    _, [step] = played(domain({"command": COMMAND, "call_timeout": limits.EXPIRY}), calls(("waits", "{}")))
    [late] = contents(step)
    assert late.startswith("Error: 'waits' ") and late.endswith(f" {limits.EXPIRY:g} s")
    assert step.metrics == {"tool_errors": 1.0}


def test_an_answer_with_half_a_surrogate_pair_arrives() -> None:
    """JavaScript's servers escape it when they cut an emoji in two."""
    halved = f"'{sys.executable}' '{SERVER}' | sed -u 's/\"42\"/\"4\\\\ud83d\"/'"
    _, [step] = played(domain({"command": ("sh", "-c", halved)}), calls(("double", '{"number": 21}')))
    assert contents(step) == ["4\N{REPLACEMENT CHARACTER}"]


@pytest.mark.parametrize("environment", ["calculator", "tool_use"])
def test_each_episode_has_its_own_mcp_server(environment: str) -> None:
    """`calculator` runs in a process that makes one call at a time, `tool_use` in one that makes calls concurrently."""

    async def go() -> None:
        process, row = (
            domain({"command": COMMAND}, environment=environment),
            {"question": "1+1=", "answer": "2", "prompt": "go"},
        )
        try:
            await process.start()
            await asyncio.gather(*[process.open(session, row, 0) for session in (0, 1)])
            steps = [await process.step(session, calls(("whoami", "{}"))) for session in (0, 1, 0)]
            pids = [int(contents(step)[0]) for step in steps]
            assert pids[0] == pids[2] != pids[1] and all(map(psutil.pid_exists, pids))
            await process.end(0)
            await limits.comes_true(
                lambda: not psutil.pid_exists(pids[0]), "the server of the episode that ended is gone"
            )
            assert contents(await process.step(1, calls(("double", '{"number": 2}')))) == ["4"]
        finally:
            await process.close()
        await limits.comes_true(lambda: not any(map(psutil.pid_exists, pids)), "no server is left")

    run(go())


def test_a_server_that_ends_breaks_its_episode() -> None:
    with pytest.raises(EnvironmentFailed, match="MCP server .* ended"):
        played(domain({"command": COMMAND}), calls(("ends", "{}")))


@pytest.mark.parametrize(
    "server", [{"command": ("/no/such/server",)}, {"command": ("true",)}, {"url": "http://127.0.0.1:9/mcp"}]
)
def test_unreachable_mcp_server_fails_its_episode(server: dict[str, Any]) -> None:
    with pytest.raises(EnvironmentFailed, match="server .* started or reached"):
        played(domain(server))


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(EnvironmentFailed, match="named 'double'"):
        played(domain({"command": COMMAND}, {"command": COMMAND}))


def test_structured_content_keeps_its_letters() -> None:
    assert result_text(CallToolResult(content=[], structured_content={"town": "Köln"})) == '{"town": "Köln"}'


def test_a_server_over_http() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = subprocess.Popen([*COMMAND, str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        limits.until(lambda: _listens(port), "the server listens")
        _, [step] = played(domain({"url": f"http://127.0.0.1:{port}/mcp"}), calls(("double", '{"number": 5}')))
        assert contents(step) == ["10"]
    finally:
        server.kill()
        server.wait(limits.END)


def _listens(port: int) -> bool:
    with socket.socket() as asked:
        return asked.connect_ex(("127.0.0.1", port)) == 0
