"""The environment `code_repl`: the policy writes, runs and corrects a program in the real sandbox."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest

from roll.agents.environments.base import Observation, Step
from roll.agents.environments.code_repl import CodeRepl
from roll.rewards.sandbox import bubblewrap
from roll.rewards.sandbox.bubblewrap import SandboxUnavailable
from tests.limits import CPU_EXPIRY, RUN

SQUARES = {
    "prompt": "Print the square of the number you read.",
    "case_type": "input",
    "test_cases": [{"stdin": f"{number}\n", "expected_stdout": f"{number * number}"} for number in (2, 3, 4, 5, 0)],
}
ASSERTS = {
    "messages": json.dumps(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Write add(a, b)."}]
    ),
    "case_type": "assert",
    "test_cases": json.dumps([{"assert_code": f"assert add({number}, 1) == {number + 1}"} for number in range(3)]),
}


def program(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": f"<think>hm</think>Try this:\n```python\n{text}\n```"}


def played(
    row: dict[str, Any], messages: Sequence[dict[str, str]], **environment_args: Any
) -> tuple[Observation, list[Step]]:
    async def play() -> tuple[Observation, list[Step]]:
        world = CodeRepl(**{"wall_seconds": RUN, **environment_args})
        first = await world.reset(row, 0)
        steps = [await world.step(message) for message in messages]
        world.close()
        return first, steps

    return asyncio.run(play())


def test_a_program_is_written_run_and_corrected() -> None:
    tries = ["print(int(input()) + 2)", "print(1 /", "print(int(input()) * int(input()))", "print(int(input()) ** 2)"]
    first, steps = played(SQUARES, [program(text) for text in tries], public_cases=2, max_steps=5)
    [asked] = first.messages
    assert asked["role"] == "user" and asked["content"].startswith("Print the square")
    assert "Input:\n2\n\nExpected output:\n4" in asked["content"] and "Expected output:\n9" in asked["content"]
    assert "16" not in asked["content"] and "25" not in asked["content"], "a hidden case is shown"
    texts = [step.messages[0]["content"] for step in steps[:3]]
    assert texts[0].startswith("Test 1: passed.\n\nTest 2: wrong output.\nIt printed:\n5\n\nExpected:\n9")
    assert texts[0].endswith("You have 4 attempt(s) left.")
    assert "Test 1: compile error: SyntaxError" in texts[1]
    assert "Test 1: failed: EOFError" in texts[2]
    assert [(step.reward, step.done) for step in steps] == [(0.0, False)] * 3 + [(1.0, True)]
    assert steps[-1].metrics == {"public_passed": 1.0, "attempts": 4.0, "success": 1.0}


def test_hidden_cases_judge_what_passes_the_public_ones() -> None:
    """The hidden cases expect 9, 16, 25 and 0. Doubling is right for 2, the public case, and for 0, one of the four
    hidden cases.
    """
    _, [step] = played(SQUARES, [program("print(int(input()) * 2)")])
    assert (step.reward, step.done, step.metrics["success"]) == (0.25, True, 0.0)


def test_the_last_attempt_is_judged_whatever_it_is() -> None:
    _, steps = played(SQUARES, [program("print(0)")] * 2, max_steps=2)
    assert [(step.reward, step.done) for step in steps] == [(0.0, False), (0.25, True)]
    _, steps = played(SQUARES, [{"role": "assistant", "content": "```rust\nfn main() {}\n```"}] * 2, max_steps=2)
    assert [(step.reward, step.done) for step in steps] == [(0.0, False), (0.0, True)]
    assert "no Python program" in str(steps[0].messages[0]["content"])
    assert steps[1].metrics == {"no_program": 1.0, "attempts": 2.0, "success": 0.0}


def test_asserts_and_messages_as_json_text() -> None:
    first, steps = played(
        ASSERTS, [program("def add(a, b):\n    return a - b"), program("def add(a, b):\n    return a + b")]
    )
    assert first.messages[0] == {"role": "system", "content": "Be brief."}
    assert first.messages[1]["content"].startswith("Write add(a, b).\n\nWrite a Python program")
    assert first.messages[1]["content"].endswith("Test:\nassert add(0, 1) == 1")
    assert steps[0].messages[0]["content"].startswith("Test 1: failed: AssertionError")
    assert (steps[1].reward, steps[1].done) == (1.0, True)


def test_endless_program_is_ended_and_reported() -> None:
    _, [step] = played(SQUARES, [program("while True: pass")], cpu_seconds=CPU_EXPIRY)
    assert step.messages[0]["content"].startswith("Test 1: timeout") and not step.done


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({**SQUARES, "test_cases": SQUARES["test_cases"][:1]}, r"1 test case\(s\); with public_cases 1 none is hidden"),
        (
            {key: value for key, value in SQUARES.items() if key != "prompt"},
            "neither 'messages' nor 'prompt'; it has the columns",
        ),
        ({**SQUARES, "case_type": "none"}, "'case_type' is 'none'"),
    ],
)
def test_rows_that_cannot_be_played_are_refused(row: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        played(row, [])


def test_without_a_sandbox_there_is_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*_: Any) -> None:
        raise SandboxUnavailable(f"no; {bubblewrap.REMEDY}")

    monkeypatch.setattr("roll.agents.environments.code_repl.ready", absent)
    with pytest.raises(SandboxUnavailable, match="set `sandbox: none`"):
        played(SQUARES, [])


def test_impossible_values_are_refused() -> None:
    with pytest.raises(ValueError, match="they are 0 and 4"):
        CodeRepl(public_cases=0)
