"""The environments that roll ships, each in its own process, as in a run."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from roll.agents.environments.base import Observation, Step
from roll.agents.environments.process import EnvironmentProcess
from roll.config.derived.domains import environment_of
from roll.config.schema.environments import EnvironmentConfig
from roll.config.shipped import known_environments
from tests import limits

PYTHON = "roll.agents.python_tool:python"
CODE_ROW = {
    "prompt": "Print the sum of the two numbers.",
    "case_type": "input",
    "test_cases": [{"stdin": f"{number} 1", "expected_stdout": f"{number + 1}"} for number in range(3)],
}


def played(
    domain: str, row: dict[str, Any], messages: list[dict[str, Any]], **keys: Any
) -> tuple[Observation, list[Step]]:
    section = EnvironmentConfig.model_validate({"step_timeout": limits.CALL, "episode_timeout": limits.RUN, **keys})

    async def play() -> tuple[Observation, list[Step]]:
        process = EnvironmentProcess(domain, section, limits.START)
        try:
            await process.start()
            first = await process.open(0, row, 7)
            steps = [await process.step(0, message) for message in messages]
            await process.end(0)
            return first, steps
        finally:
            await process.close()

    return asyncio.run(play())


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def cases() -> Iterator[Any]:
    code = "```python\na, b = input().split()\nprint(int(a) + int(b))\n```"
    yield pytest.param("frozen_lake", {}, said("Left"), -0.01, {"is_slippery": False}, id="frozen_lake")
    yield pytest.param("sokoban", {}, said("Left"), -0.15, {"dim_room": [7, 7], "num_boxes": 2}, id="sokoban")
    yield pytest.param("code_repl", CODE_ROW, said(code), 1.0, {"wall_seconds": limits.CALL}, id="code_repl")


@pytest.mark.parametrize(("domain", "row", "message", "reward", "environment_args"), list(cases()))
def test_it_is_played_in_a_process(
    domain: str, row: dict[str, Any], message: dict[str, Any], reward: float, environment_args: Any
) -> None:
    first, [step] = played(domain, row, [message], environment_args=environment_args)
    assert first.messages and step.reward == reward


def test_tools_alone_make_an_environment() -> None:
    call = {
        "id": "1",
        "type": "function",
        "function": {"name": "python", "arguments": json.dumps({"code": "print(6 * 7)"})},
    }
    messages = [{**said(""), "tool_calls": [call]}, said("42")]
    first, steps = played("sums", {"prompt": "6 times 7?"}, messages, tools=(PYTHON,))
    assert [tool["function"]["name"] for tool in first.tools] == ["python"]
    assert (steps[0].messages[0]["content"].strip(), steps[0].done, steps[1].done) == ("42", False, True)


@pytest.mark.parametrize(
    ("domain", "keys", "name"),
    [
        ("sokoban", {}, "sokoban"),
        ("sokoban", {"tools": (PYTHON,)}, "sokoban"),
        ("sums", {"tools": (PYTHON,)}, "tool_use"),
        ("sums", {"tools": (PYTHON,), "environment": "a:B"}, "a:B"),
        ("sums", {}, "sums"),
    ],
)
def test_the_environment_of_a_domain(domain: str, keys: dict[str, Any], name: str) -> None:
    assert environment_of(domain, EnvironmentConfig.model_validate(keys)) == name
    assert {"calculator", "code_repl", "frozen_lake", "sokoban", "tool_use"} <= set(known_environments())
