"""Environments are tried before a run, and their faults are reported with file and line."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest

from roll.errors import Fault
from roll.runs.rlvr.environment_trial import try_environments
from tests import limits
from tests.unit.environments.running import section

pytestmark = pytest.mark.usefixtures("marks", "nothing_left_behind")
TOOLS = '''
import uuid
from typing import Literal, Sequence
from roll.agents.environments.base import Observation


def sound(text: str, times: int = 1) -> str:
    """Repeat a text.

    Args:
        text: Text to repeat.
        times: Number of repetitions.
    """
    return text * times


def untyped(text) -> str:
    """Lack a type hint."""
    return text


def undescribed(text: str) -> str:
    return text


def several(*texts: str) -> str:
    """Accept positional arguments only."""
    return ""


class Short:
    def reset(self, row):
        ...
    def step(self, message):
        ...


class Drawn:
    def reset(self, row, seed):
        return Observation([{"role": "user", "content": uuid.uuid4().hex if row["drawn"] else str(seed)}])
    def step(self, message): ...
    def close(self): ...


class Odd:
    malformed_calls = "ignore"
    def reset(self, row, seed): ...
    def step(self, message): ...
    def close(self): ...


class Typed:
    def __init__(self, slippery: bool = False, size: int = 4, mode: str = "", side: Literal["left"] = "left",
                 rate: float | None = None, names: Sequence[str] = (), most: int = None, _own: int = 0): ...
    def reset(self, row, seed): ...
    def step(self, message): ...
    def close(self): ...
'''


def faults(row: dict[str, Any] | None = None, problem: str = "", **others: Any) -> list[Fault]:
    return asyncio.run(
        try_environments(
            {"act": section(**others)},
            {} if row is None else {"act": row},
            limits.START,
            lambda first: problem and f"{problem} {len(first.messages)}",
        )
    )


@pytest.fixture
def own_tools(marks: Path) -> Path:
    """Return a folder with the modules `own_tools` and `broken`."""
    (marks / "own_tools.py").write_text(TOOLS)
    (marks / "broken.py").write_text("x = 1\ny = x / 0\n")
    return marks


@pytest.mark.usefixtures("own_tools")
def test_what_is_sound_has_no_fault() -> None:
    assert faults({"name": "ada"}, tools=("own_tools:sound",)) == []
    assert faults(None) == []
    assert faults({"seed": 3}, environment="calculator") == []
    assert faults({"name": "ada"}, environment="worlds:Awaited") == []


@pytest.mark.usefixtures("own_tools")
@pytest.mark.parametrize(
    ("keys", "place", "problem", "remedy"),
    [
        (
            {"environment": "calculater"},
            "environment",
            "no environment is named 'calculater'",
            "did you mean 'calculator'?",
        ),
        (
            {"environment": "nowhere:World"},
            "environment",
            "'nowhere:World' is not found: No module named 'nowhere'",
            "name one of calculator",
        ),
        ({"environment": "worlds:world"}, "environment", "worlds has no such class", "`package.module:Class`"),
        (
            {"environment": "broken:World"},
            "environment",
            "'broken:World' cannot be imported: ZeroDivisionError",
            "fix the module",
        ),
        (
            {"environment_args": {"start": 3}},
            "environment_args",
            "does not fit 'worlds:World'",
            "the class accepts (begin: ",
        ),
        (
            {"environment": "own_tools:Short"},
            "environment",
            "reset' cannot be called as reset(self, row, seed)",
            "give it the parameters",
        ),
        (
            {"environment": "own_tools:Odd"},
            "environment",
            "has malformed_calls 'ignore'",
            "set it to one of answer, end, step",
        ),
        ({"tools": ("own_tools",)}, "tools", "'own_tools' is not the name of a tool", "`package.module:function`"),
        (
            {"tools": ("own_tools:sound", "own_tools:sound")},
            "tools",
            "two tools are named 'sound'",
            "every parameter a name",
        ),
        ({"tools": ("own_tools:gone",)}, "tools", "own_tools has no such function", "name a function of the module"),
        ({"tools": ("own_tools:undescribed",)}, "tools", "'undescribed' has no docstring", "give it a docstring"),
        (
            {"tools": ("own_tools:untyped",)},
            "tools",
            "the parameter 'text' of 'untyped' has no type hint",
            "a type hint",
        ),
        (
            {"tools": ("own_tools:several",)},
            "tools",
            "'several' has the parameter *texts: str, which cannot be passed by keyword",
            "a type hint",
        ),
    ],
)
def test_what_cannot_be_loaded_is_a_fault(keys: dict[str, Any], place: str, problem: str, remedy: str) -> None:
    found = [*faults(None, **keys)]
    if keys.get("environment") == "own_tools:Short":
        assert found.pop().problem == "'own_tools:Short' has no method 'close'"
    [fault] = found
    assert fault.place == f"environments.act.{place}"
    assert problem in fault.problem
    assert remedy in fault.remedy


def test_import_fault_names_line_of_module(own_tools: Path) -> None:
    [fault] = faults(None, environment="broken:World")
    assert fault.problem.endswith(f"({own_tools / 'broken.py'}, line 2)")
    (own_tools / "unclosed.py").write_text("x = 1\ny = (\n")
    [fault] = faults(None, environment="unclosed:World")
    assert fault.problem.endswith(f"SyntaxError: '(' was never closed ({own_tools / 'unclosed.py'}, line 2)")


def test_failing_reset_is_fault_with_its_line(marks: Path) -> None:
    [fault] = faults({"name": "ada", "fail": "raise"})
    line = (marks / "worlds.py").read_text().splitlines().index('        raise KeyError("no such door")  # raise') + 1
    assert (fault.place, fault.code) == ("environments.act.environment", "failed")
    assert fault.problem.startswith("'worlds:World', reset on") and "reset failed: KeyError" in fault.problem
    assert fault.problem.endswith(f"({marks / 'worlds.py'}, line {line})")
    assert fault.remedy.endswith(" columns name, fail")


def test_unusable_first_observation_is_a_fault() -> None:
    [fault] = faults({"seed": 1}, problem="tokens of messages:", environment="calculator")
    assert fault.problem.startswith("'calculator', reset on") and fault.problem.endswith(": tokens of messages: 1")
    assert fault.code == "unfit" and "raise prompt_length" in fault.remedy


@pytest.mark.usefixtures("own_tools")
def test_resets_with_one_seed_must_be_equal() -> None:
    assert faults({"drawn": False}, environment="own_tools:Drawn") == []
    [fault] = faults({"drawn": True}, environment="own_tools:Drawn")
    assert (fault.place, fault.code) == ("environments.act.environment", "unfit") and "seed" in fault.remedy


def test_hanging_or_exiting_reset_is_a_fault() -> None:
    [late] = faults({"fail": "hang"}, step_timeout=limits.EXPIRY)
    assert late.code == "timed_out" and " step_timeout, 1 s" in late.problem
    assert late.remedy.endswith(" raise environments.act.step_timeout")
    [ended] = faults({"fail": "leave"})
    assert ended.code == "failed" and "with status 3" in ended.problem


def test_row_unusable_by_environment_is_a_fault() -> None:
    [fault] = faults({"question": "1+1="}, environment="calculator")
    assert fault.code == "failed" and "columns question" in fault.problem


@pytest.mark.usefixtures("own_tools")
@pytest.mark.parametrize(
    ("environment", "key", "value"),
    [
        ("own_tools:Typed", "slippery", "no"),
        ("own_tools:Typed", "slippery", "False"),
        ("own_tools:Typed", "slippery", 1),
        ("own_tools:Typed", "size", 4.0),
        ("own_tools:Typed", "mode", math.nan),
        ("own_tools:Typed", "side", "right"),
        ("own_tools:Typed", "rate", "fast"),
        ("own_tools:Typed", "names", "ada"),
        ("own_tools:Typed", "most", "nine"),
        ("frozen_lake", "is_slippery", "no"),
        ("openenv", "base_url", 8000),
        ("shell", "as_tool", "no"),
    ],
)
def test_arguments_of_another_type_are_faults(environment: str, key: str, value: Any) -> None:
    [fault] = faults(None, environment=environment, environment_args={key: value})
    assert fault.place == f"environments.act.environment_args.{key}"
    assert fault.code in ("wrong_type", "not_allowed") and fault.remedy.startswith(("give ", "allowed: "))


@pytest.mark.usefixtures("own_tools")
def test_arguments_of_the_annotated_types_pass() -> None:
    given = {"slippery": True, "size": 5, "mode": "no", "rate": 1, "names": ["ada"], "most": None, "_own": 3}
    assert faults(None, environment="own_tools:Typed", environment_args=given) == []
