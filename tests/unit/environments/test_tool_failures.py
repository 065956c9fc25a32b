"""Failures of tools are told once for each kind, with the tool's own lines."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, cast

import pytest

from roll.agents.environment_workers import EnvironmentWorker, EnvironmentWorkers
from roll.agents.environments.base import Step
from roll.agents.environments.checked import ToldStep
from roll.agents.environments.process import EnvironmentProcess
from roll.agents.tool_failures import MOST_TOLD, ToolFailure
from roll.errors import EnvironmentFailed
from roll.ray.group import WorkerGroup
from roll.runs.rlvr.tool_failures import ToolFailures
from tests import limits
from tests.unit.environments.running import calls, section
from tests.unit.rewards.running import run

SERVER = Path(__file__).with_name("mcp_server.py")
TOOLS = '''
import time
from roll.agents.tools import CallError


def broken(town: str) -> str:
    """Fail."""
    return {}[town]  # broken


async def broken_later(town: str) -> str:
    """Fail."""
    raise ValueError("no " + town)  # later


def opaque() -> object:
    """Return an object."""
    return [object()]


def strict(town: str) -> str:
    """Refuse the policy's call."""
    raise CallError("no town is named " + town)


def hangs() -> str:
    """Hang."""
    time.sleep(3600)
'''


@pytest.fixture(autouse=True)
def own_tools(marks: Path) -> Path:
    """Return the file of the module `failing_tools`."""
    (file := marks / "failing_tools.py").write_text(TOOLS)
    return file


def line_of(mark: str) -> int:
    """Return the number of the line of the tools that ends with a comment."""
    return next(number for number, line in enumerate(TOOLS.splitlines(), 1) if line.endswith(f"# {mark}"))


def told(step: Step) -> list[ToolFailure]:
    return list(step.tool_failures) if isinstance(step, ToldStep) else []


def steps(*messages: dict[str, Any], **keys: Any) -> list[Step]:
    """Return the steps after the messages in one process."""

    async def go() -> list[Step]:
        process = EnvironmentProcess("act", section(environment="calculator", **keys), limits.START)
        try:
            await process.open(0, {"question": "1+1=", "answer": "2"}, 0)
            return [await process.step(0, message) for message in messages]
        finally:
            await process.close()

    return run(go())


def test_first_failure_of_each_kind_is_told(own_tools: Path) -> None:
    tools = tuple(f"failing_tools:{name}" for name in ("broken", "broken_later", "opaque", "strict"))
    ulm, opaque = '{"town": "Ulm"}', ("opaque", "{}")
    first, again = steps(
        calls(("broken", ulm), ("broken_later", ulm), opaque, ("strict", ulm), ("calc", '{"x": "?"}')),
        calls(("broken", '{"town": "Bonn"}'), ("broken_later", ulm), opaque),
        tools=tools,
    )
    assert first.metrics == {"tool_errors": 5.0} and again.metrics == {"tool_errors": 3.0}
    by_key, raised, unwritable = told(first)
    assert by_key.kind == f"KeyError at {own_tools}, line {line_of('broken')}"
    assert "return {}[town]" in by_key.trace and "'Ulm'" in by_key.note
    assert raised.kind == f"ValueError at {own_tools}, line {line_of('later')}"
    assert unwritable.tool == "opaque" and "type object" in unwritable.note
    assert not told(again)


def test_failures_of_servers_are_told() -> None:
    server = {"command": (sys.executable, str(SERVER)), "call_timeout": limits.EXPIRY}
    [step] = steps(calls(("falls", '{"number": 3}'), ("waits", "{}")), mcp=(server,))
    fell, late = sorted(told(step))
    assert fell.tool == "falls" and "no 3 here" in fell.note
    assert late.tool == "waits" and late.kind.endswith("timed out") and "call_timeout" in late.note


def test_a_tool_that_hangs_is_named() -> None:
    with pytest.raises(EnvironmentFailed, match="step_timeout.*'hangs'"):
        steps(calls(("hangs", "{}")), tools=("failing_tools:hangs",), step_timeout=limits.EXPIRY)


def test_each_kind_is_said_once() -> None:
    said: list[tuple[str, str]] = []
    failures = ToolFailures(lambda topic, text: said.append((topic, text)), lambda text: text.replace("key-7", "***"))
    section_of = section(environment="calculator")
    group = cast(WorkerGroup[EnvironmentWorker], [None, None])
    workers = EnvironmentWorkers({"act": group}, {"act": section_of}, limits.START, failures.observe)
    domain = workers._domains["act"]
    for number in range(2):
        failed = ToolFailure("look", "KeyError at tools.py, line 3", f"KeyError: {number}", "line 3\nkey-7")
        domain.had(ToldStep(tool_failures=(failed,)))
    domain.had(Step())
    [(topic, text)] = said
    assert topic.startswith("environments.act: look: KeyError") and "episode/tool_errors" in text
    assert "  line 3\n  ***" in text
    for number in range(2 * MOST_TOLD):
        failures.observe("act", ToolFailure("look", f"kind {number}", "note", ""))
    assert len(said) == MOST_TOLD
