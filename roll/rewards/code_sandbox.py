"""A reward for programs that pass their tests. Programs run in a sandbox, in a process that never sees a test's expected output."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import Any, Literal

from roll.config.derived.rewards import SANDBOX_WALL_SECONDS
from roll.rewards.answers import final_text
from roll.rewards.base import REWARDS
from roll.rewards.programs import Cases, cases_of, job_of, program_of
from roll.rewards.sandbox.bubblewrap import SandboxUnavailable, survey
from roll.rewards.sandbox.fusion import answers, run_at
from roll.rewards.sandbox.program import Ending, Limits, Outcome, ready, run
from roll.types import Prompt, RewardOutcome, RewardResult

BUBBLEWRAP, NO_SANDBOX, SERVER = "bubblewrap", "none", ("http://", "https://")
LATE = (Ending.CPU_TIME, Ending.WALL_TIME)


@REWARDS.register("code_sandbox")
def code_sandbox(
    prompt: Prompt,
    response: str,
    row: Mapping[str, Any],
    *,
    cases: Literal["all", "first_failure"] = "all",
    sandbox: str = BUBBLEWRAP,
    python: str | None = None,
    cpu_seconds: int = 4,
    wall_seconds: float = SANDBOX_WALL_SECONDS,
    memory_mib: int = 1024,
    disk_mib: int = 64,
    output_mib: int = 4,
) -> RewardResult:
    """Return the share of the row's test cases that the program in the response passes.

    The outcome is UNPARSABLE if the response has no program, and UNAVAILABLE if no sandbox can run.

    Args:
        cases: `all` runs every case; `first_failure` stops after the first case that fails.
        sandbox: `bubblewrap`, the address of a SandboxFusion server, or `none` to run programs unisolated, with the files and the
            network of this machine.
        python: path of a Python interpreter; programs may import its packages. By default programs run with roll's own interpreter and
            may import only the standard library.
        cpu_seconds: CPU time limit of each case in seconds.
        wall_seconds: Wall-clock limit in seconds of all cases together. `timeout` of the domain must be longer.
        memory_mib: limit of the program's address space.
        disk_mib: size of the program's /tmp.
        output_mib: limit of the output of each case.

    With a server, `wall_seconds` and `disk_mib` have no effect.

    Raises:
        ValueError: the row's cases cannot be read, or `sandbox` has an unknown value.
    """
    if sandbox not in (BUBBLEWRAP, NO_SANDBOX) and not sandbox.startswith(SERVER):
        raise ValueError(f"sandbox is '{sandbox}'; it must be {BUBBLEWRAP}, {NO_SANDBOX} or the address of a server (http://...)")
    wanted = cases_of(row)
    text = final_text(response)
    program = text if wanted.kind == "text" else program_of(text)
    limits = Limits(cpu_seconds, wall_seconds, memory_mib, disk_mib, output_mib)
    try:
        if sandbox.startswith(SERVER):
            answers(sandbox)
        else:
            ready(survey(python), sandbox == BUBBLEWRAP)
        if program is None:
            return RewardResult(0.0, RewardOutcome.UNPARSABLE, note="no Python program in the response")
        job = job_of(wanted, program)
        remote = sandbox.startswith(SERVER)
        outcomes = run_at(sandbox, job, limits) if remote else run(job, limits, survey(python), sandbox == BUBBLEWRAP)
        return verdict(outcomes, wanted, until_first=cases == "first_failure")
    except SandboxUnavailable as error:
        return RewardResult(0.0, RewardOutcome.UNAVAILABLE, note=str(error))


def verdict(outcomes: Iterator[Outcome], cases: Cases, until_first: bool) -> RewardResult:
    """Return the result for the outcomes of a program's cases. Outputs are compared with the expected ones here, outside the sandbox."""
    total = len(cases.inputs) or len(cases.tests)
    passed, late, spent, note, uncompiled = 0, 0, 0.0, "", 0.0
    with closing(outcomes):  # type: ignore[type-var]
        for index, outcome in enumerate(outcomes):
            spent += outcome.cpu_seconds
            if outcome.ending == Ending.OK and (not cases.expected or _same(outcome.output, cases.expected[index])):
                passed += 1
                continue
            late += outcome.ending in LATE
            uncompiled = float(outcome.ending == Ending.COMPILE_ERROR)
            note = note or f"case {index + 1} of {total}: {describe(outcome)}"
            if until_first or uncompiled:
                break
    share = passed / total
    parts = {"passed": share, "compile_error": uncompiled, "timeout": late / total, "cpu_seconds": spent}
    return RewardResult(share, parts=parts, note=note or f"{total} of {total} cases")


def _same(output: bytes, expected: str) -> bool:
    return output.decode("utf-8", "replace").strip() == expected


def describe(outcome: Outcome) -> str:
    """Return the reason why a case failed."""
    why = {
        Ending.OK: "wrong output",
        Ending.FAILED: "failed",
        Ending.COMPILE_ERROR: "compile error",
        Ending.CPU_TIME: "timeout (CPU time)",
        Ending.WALL_TIME: "timeout (wall time)",
        Ending.OUTPUT_SIZE: "too much output",
    }[outcome.ending]
    return f"{why}: {outcome.note}" if outcome.note else why
