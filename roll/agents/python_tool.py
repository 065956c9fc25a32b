"""A tool that runs Python programs in the code sandbox: `tools: [roll.agents.python_tool:python]`."""

from __future__ import annotations

import asyncio

from roll.errors import EnvironmentFailed
from roll.rewards.functions.code_sandbox import describe
from roll.rewards.sandbox.bubblewrap import SandboxUnavailable, find_interpreter
from roll.rewards.sandbox.program import CaseEnd, Job, Outcome, ProgramLimits, ready, run_program

LIMITS = ProgramLimits(cpu_seconds=4, wall_seconds=8.0, memory_mib=512)
"""Limits of a program. Its wall-clock limit is below the default `step_timeout`."""
MOST_PRINTED = 8000
"""Largest number of characters of a program's output in the answer."""


async def python(code: str) -> str:
    """Run a Python program, which has the standard library and neither files nor network, and get what it prints.

    Args:
        code: The program. Print what you want to see.
    """
    try:
        return tool_answer(await asyncio.to_thread(_ran, code))
    except SandboxUnavailable as error:
        raise EnvironmentFailed(str(error)) from error


def _ran(code: str) -> Outcome:
    interpreter = find_interpreter(None)
    ready(interpreter, True)
    [outcome] = run_program(Job(code, "input", (b"",)), LIMITS, interpreter)
    return outcome


def tool_answer(outcome: Outcome) -> str:
    """Return the tool's answer to the model for the outcome of a program."""
    printed = outcome.output.decode("utf-8", "replace")
    if len(printed) > MOST_PRINTED:
        printed = f"{printed[:MOST_PRINTED]}... ({len(printed)} characters)"
    if outcome.ending is CaseEnd.OK:
        return printed or "(it printed nothing)"
    return f"{printed}\n{describe(outcome)}".lstrip()
