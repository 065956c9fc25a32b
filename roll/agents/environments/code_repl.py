"""Programming with feedback: the policy writes a program, sees its results on public test cases, and may correct it.

Hidden test cases determine the reward. Programs run in the sandbox.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from typing import Any

from roll.agents.environments.base import ENVIRONMENTS, Message, Observation, Step
from roll.agents.environments.tasks import task_of, with_more
from roll.config.derived.domains import MOST_STEPS
from roll.rewards.answers import final_text
from roll.rewards.functions.code_sandbox import cases_verdict, describe
from roll.rewards.programs import Cases, cases_of, job_of, passes, program_of
from roll.rewards.sandbox.bubblewrap import find_interpreter
from roll.rewards.sandbox.program import Outcome, ProgramLimits, ready, run_program
from roll.types import RewardResult

SHOWN = 500
"""Largest number of characters of an input, an output or a test that the policy is shown."""
INSTRUCTION = (
    "Write a Python program in a fenced block (```python). It is run on {public} public test(s), and you are shown "
    "what happens. When it passes them, or after {left} attempt(s), hidden tests judge it."
)
NO_PROGRAM = "There is no Python program in your message. Write one in a fenced block (```python)."


@ENVIRONMENTS.register("code_repl")
class CodeRepl:
    """A row's task and test cases, in the columns of the reward `code_sandbox`: `case_type`, `test_cases`,
    `test_case_function`.

    The episode ends with the first attempt that passes the public cases, or with the last attempt. The hidden cases
    judge that attempt: the reward is the share of them that pass. In `check_based` rows each `assert` is a case.
    """

    malformed_calls = "step"

    def __init__(
        self,
        public_cases: int = 1,
        max_steps: int = MOST_STEPS["code_repl"],
        sandboxed: bool = True,
        python: str | None = None,
        cpu_seconds: int = 2,
        wall_seconds: float = 4.0,
        memory_mib: int = 1024,
        disk_mib: int = 64,
        output_mib: int = 4,
        column: str | None = None,
    ) -> None:
        """
        Args:
            public_cases: number of public cases, the first ones of the row. All others are hidden.
            max_steps: number of attempts.
            sandboxed: if false, programs run without isolation, with the files and the network of this machine.
            python: path of a Python interpreter whose packages programs may import. By default programs run with roll's
                own interpreter and may import only the standard library.
            cpu_seconds: CPU time limit of each case.
            wall_seconds: wall-clock limit of all public cases together, and again of all hidden ones. `step_timeout`
                must be more than twice as long.
            memory_mib: limit of the program's address space.
            disk_mib: size of the program's /tmp.
            output_mib: limit of the output of each case.
            column: column of the row that holds the task. The default is `messages`, or `prompt` if the row has no
                `messages`.

        Raises:
            ValueError: `public_cases` or `max_steps` is below 1.
        """
        if public_cases < 1 or max_steps < 1:
            raise ValueError(f"public_cases and max_steps must be at least 1; they are {public_cases} and {max_steps}")
        self._public_count, self._max_steps, self._sandboxed, self._python = public_cases, max_steps, sandboxed, python
        self._limits = ProgramLimits(cpu_seconds, wall_seconds, memory_mib, disk_mib, output_mib)
        self._column, self._steps = column, 0

    async def reset(self, row: Mapping[str, Any], seed: int) -> Observation:
        """Return the row's task.

        Raises:
            ValueError: the row has no task or no readable cases, or no case would be hidden.
            SandboxUnavailable: this machine cannot run the sandbox.
        """
        self._public, self._hidden = split_cases(cases_of(row), self._public_count)
        await asyncio.to_thread(ready, find_interpreter(self._python), self._sandboxed)
        task = INSTRUCTION.format(public=self._public_count, left=self._max_steps)
        return Observation(with_more(task_of(row, self._column), f"{task}\n\n{cases_text(self._public)}"))

    async def step(self, message: Message) -> Step:
        """Run the program in the message. Return the results on the public cases or, at the end, the reward."""
        self._steps += 1
        text = final_text(str(message.get("content") or ""))
        is_last = self._steps >= self._max_steps
        program = text if self._public.kind == "text" else program_of(text)
        if program is None:
            return self._retry_step(NO_PROGRAM, is_last, {"no_program": 1.0})
        passed, seen = await asyncio.to_thread(self._tried, program)
        if passed < self._public_count and not is_last:
            return self._retry_step(seen, is_last, {})
        judged = await asyncio.to_thread(self._judged, program)
        counted = {
            "public_passed": passed / self._public_count,
            "attempts": float(self._steps),
            "success": float(judged.value == 1.0),
        }
        return Step(reward=judged.value, done=True, metrics=counted)

    def close(self) -> None:
        """Do nothing: each sandbox ends with its program."""

    def _retry_step(self, what: str, is_last: bool, counted: Mapping[str, float]) -> Step:
        if is_last:
            return Step(done=True, metrics={**counted, "attempts": float(self._steps), "success": 0.0})
        left = f"{what}\n\nYou have {self._max_steps - self._steps} attempt(s) left."
        return Step([{"role": "user", "content": left}], metrics=counted)

    def _tried(self, program: str) -> tuple[int, str]:
        """Return the number of public cases that a program passes, and a report on every case."""
        with closing(self._outcomes(self._public, program)) as outcomes:  # type: ignore[type-var]
            said = [(passes(self._public, number, outcome), outcome) for number, outcome in enumerate(outcomes)]
        lines = [f"Test {number + 1}: {outcome_text(self._public, number, *one)}" for number, one in enumerate(said)]
        return sum(is_right for is_right, _ in said), "\n\n".join(lines)

    def _judged(self, program: str) -> RewardResult:
        return cases_verdict(self._outcomes(self._hidden, program), self._hidden, until_first=False)

    def _outcomes(self, cases: Cases, program: str) -> Iterator[Outcome]:
        return run_program(job_of(cases, program), self._limits, find_interpreter(self._python), self._sandboxed)


def split_cases(cases: Cases, public: int) -> tuple[Cases, Cases]:
    """Return (public cases, hidden cases). Raises ValueError if no case would be hidden."""
    count = len(cases.inputs) or len(cases.tests)
    if count <= public:
        raise ValueError(f"the row has {count} test case(s); with public_cases {public} none is hidden")

    def first_cases(part: slice) -> Cases:
        return replace(cases, inputs=cases.inputs[part], expected=cases.expected[part], tests=cases.tests[part])

    return first_cases(slice(public)), first_cases(slice(public, None))


def cases_text(cases: Cases) -> str:
    """Return the description of the public cases for the first message."""
    if cases.expected:
        pairs = zip(cases.inputs, cases.expected, strict=True)
        return "\n\n".join(
            f"Input:\n{_cut(_text(given))}\nExpected output:\n{_cut(expected)}" for given, expected in pairs
        )
    return "\n\n".join(f"Test:\n{_cut(code)}" for _, code, _ in cases.tests)


def outcome_text(cases: Cases, number: int, is_right: bool, outcome: Outcome) -> str:
    """Return the report on a public case."""
    if is_right:
        return "passed."
    printed = f"\nIt printed:\n{_cut(_text(outcome.output))}" if outcome.output else ""
    expected = f"\nExpected:\n{_cut(cases.expected[number])}" if cases.expected else ""
    return f"{describe(outcome)}.{printed}{expected}"


def _text(output: bytes) -> str:
    return output.decode("utf-8", "replace")


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}... ({len(text)} characters)"
