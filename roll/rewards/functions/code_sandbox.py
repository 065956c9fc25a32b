"""A reward for programs that pass their tests. Programs run in a sandbox, in a process that never sees a test's
expected output.

Instead, they may run on a SandboxFusion server (`POST /run_code`), which runs tests in the process of the program.
"""

from __future__ import annotations

import json
import logging
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from functools import cache
from typing import Any, Literal

from roll.algorithms.methods import declares
from roll.config.derived.domains import SANDBOX_WALL_SECONDS
from roll.rewards.answers import final_text
from roll.rewards.base import REWARDS, RewardTraits
from roll.rewards.programs import Cases, cases_of, imported_packages, job_of, passes, program_of
from roll.rewards.sandbox.bubblewrap import PACKAGES, SandboxUnavailable, find_interpreter
from roll.rewards.sandbox.inside.supervisor import NOTE_BYTES
from roll.rewards.sandbox.program import MIB, CaseEnd, Job, Outcome, ProgramLimits, ready, run_program
from roll.types import Prompt, RewardOutcome, RewardResult

ANSWER_SECONDS = 30.0
"""Seconds for queueing and startup on the server, in addition to the program's CPU limit."""
CALL_CHECK = "\ncheck({entry})\n"
BUBBLEWRAP, NO_SANDBOX, SERVER = "bubblewrap", "none", ("http://", "https://")
LACKS = "{who} {packages}, and the sandbox lacks it: set reward_args.python to a Python interpreter that has it"
LATE = (CaseEnd.CPU_TIME, CaseEnd.WALL_TIME)

logger = logging.getLogger(__name__)


@REWARDS.register("code_sandbox")
@declares(RewardTraits(check_row=cases_of))
def code_sandbox(
    prompt: Prompt,
    response: str,
    row: Mapping[str, Any],
    *,
    cases: Literal["all", "first_failure"] = "all",
    pays: Literal["share", "all"] = "share",
    tolerance: float | None = None,
    block: Literal["first", "last"] = "first",
    sandbox: str = BUBBLEWRAP,
    python: str | None = None,
    cpu_seconds: int = 4,
    wall_seconds: float = SANDBOX_WALL_SECONDS,
    memory_mib: int = 1024,
    disk_mib: int = 64,
    output_mib: int = 4,
) -> RewardResult:
    """Return the share of the row's test cases that the program in the response passes.

    The outcome is UNPARSABLE if the response has no program, and UNAVAILABLE if no sandbox can run, or if the program
    fails because the interpreter lacks a package of PACKAGES that it imports.

    Args:
        cases: `all` runs every case; `first_failure` stops after the first case that fails.
        pays: `share` pays the share of the cases that pass; `all` pays 1 if every case passes, and else 0, as ROLL's
            local tests do.
        tolerance: compares numbers in the output of scripts by value, within this absolute or relative tolerance;
            ROLL's local tests allow 1e-5. None compares text. The row's column `tolerance` takes precedence.
        block: which of several fenced blocks is the program. `first`: the first that defines a function or method, or
            else the first, as in ROLL's local tests; `last`: the last, as in ROLL's tests on a server.
        sandbox: `bubblewrap`, the address of a SandboxFusion server, or `none` to run programs unisolated, with the
            files and the network of this machine.
        python: path of a Python interpreter; programs may import its packages. By default programs run with roll's own
            interpreter and may import only the standard library.
        cpu_seconds: CPU time limit of each case in seconds.
        wall_seconds: Wall-clock limit in seconds of all cases together. `timeout` of the domain must be longer.
        memory_mib: limit of the program's address space.
        disk_mib: size of the program's /tmp.
        output_mib: limit of the output of each case.

    With a server, `wall_seconds` and `disk_mib` have no effect.

    Raises:
        ValueError: the row's cases cannot be read, or `sandbox` has an unknown value.
    """
    _check_sandbox(sandbox)
    wanted = cases_of(row)
    text = final_text(response)
    program = text if wanted.kind == "text" else program_of(text, block)
    limits = ProgramLimits(cpu_seconds, wall_seconds, memory_mib, disk_mib, output_mib)
    try:
        result = _judged(
            wanted, program, sandbox, python, limits, until_first=cases == "first_failure", tolerance=tolerance
        )
    except SandboxUnavailable as error:
        return RewardResult(0.0, RewardOutcome.UNAVAILABLE, note=str(error))
    return replace(result, value=float(result.value == 1)) if pays == "all" else result


def _check_sandbox(sandbox: str) -> None:
    if sandbox not in (BUBBLEWRAP, NO_SANDBOX) and not sandbox.startswith(SERVER):
        raise ValueError(
            f"sandbox is '{sandbox}'; it must be {BUBBLEWRAP}, {NO_SANDBOX} or the address of a server (http://...)"
        )


def _judged(
    wanted: Cases,
    program: str | None,
    sandbox: str,
    python: str | None,
    limits: ProgramLimits,
    until_first: bool,
    tolerance: float | None,
) -> RewardResult:
    remote, absent = sandbox.startswith(SERVER), set[str]()
    if remote:
        check_server(sandbox)
    else:
        ready(find_interpreter(python), sandbox == BUBBLEWRAP)
        absent.update(name for name in PACKAGES if name not in find_interpreter(python).packages)
    if lacked := absent & {name for prefix, code, _ in wanted.tests for name in imported_packages(f"{prefix}\n{code}")}:
        raise SandboxUnavailable(LACKS.format(who="the row's tests import", packages=", ".join(sorted(lacked))))
    if program is None:
        return RewardResult(0.0, RewardOutcome.UNPARSABLE, note="no Python program in the response")
    job = job_of(wanted, program)
    outcomes = (
        run_at(sandbox, job, limits)
        if remote
        else run_program(job, limits, find_interpreter(python), sandbox == BUBBLEWRAP)
    )
    result = cases_verdict(outcomes, wanted, until_first, tolerance)
    if result.value < 1 and (missed := _missed(result.note, program, absent)):
        say_once(missed)
        raise SandboxUnavailable(LACKS.format(who="the program imports", packages=missed))
    return result


def _missed(note: str, program: str, absent: set[str]) -> str:
    """Return the absent package whose import ended the program, or ''."""
    return next(
        (name for name in sorted(absent & imported_packages(program)) if f"No module named '{name}" in note), ""
    )


@cache
def say_once(package: str) -> None:
    """Log that programs need a package, once for each package."""
    logger.warning(LACKS.format(who="programs import", packages=package))


def cases_verdict(
    outcomes: Iterator[Outcome], cases: Cases, until_first: bool, tolerance: float | None = None
) -> RewardResult:
    """Return the result for the outcomes of a program's cases. Outputs are compared here, outside the sandbox."""
    total = len(cases.inputs) or len(cases.tests)
    passed, late, spent, note, uncompiled = 0, 0, 0.0, "", 0.0
    with closing(outcomes):  # type: ignore[type-var]
        for index, outcome in enumerate(outcomes):
            spent += outcome.cpu_seconds
            if passes(cases, index, outcome, tolerance):
                passed += 1
                continue
            late += outcome.ending in LATE
            uncompiled = float(outcome.ending == CaseEnd.COMPILE_ERROR)
            note = note or f"case {index + 1} of {total}: {describe(outcome)}"
            if until_first or uncompiled:
                break
    share = passed / total
    parts = {"passed": share, "compile_error": uncompiled, "timeout": late / total, "cpu_seconds": spent}
    return RewardResult(share, parts=parts, note=note or f"{total} of {total} cases")


def describe(outcome: Outcome) -> str:
    """Return the reason why a case failed."""
    why = {
        CaseEnd.OK: "wrong output",
        CaseEnd.FAILED: "failed",
        CaseEnd.COMPILE_ERROR: "compile error",
        CaseEnd.CPU_TIME: "timeout (CPU time)",
        CaseEnd.WALL_TIME: "timeout (wall time)",
        CaseEnd.OUTPUT_SIZE: "too much output",
    }[outcome.ending]
    return f"{why}: {outcome.note}" if outcome.note else why


def run_at(url: str, job: Job, limits: ProgramLimits) -> Iterator[Outcome]:
    """Yield the outcome of each case. Tests are appended to the program.

    Raises:
        SandboxUnavailable: the server cannot be reached, sends an invalid answer, or reports an internal error.
    """
    for stdin in job.inputs:
        yield _outcome(_ask(url, job.source, "python", stdin.decode("utf-8", "replace"), limits))
    for test in job.tests:
        called = CALL_CHECK.format(entry=test["entry"]) if test["kind"] == "check" else ""
        source = (
            test["code"].replace("{response}", repr(test["response"]))
            if test["kind"] == "text"
            else f"{job.source}\n{test['code']}{called}"
        )
        yield _outcome(_ask(url, source, "pytest" if "def test_" in test["code"] else "python", "", limits))


@cache
def check_server(url: str) -> None:
    """Check that the server can run a small program. Once a server has passed the check, further calls for it do
    nothing.

    Raises:
        SandboxUnavailable: the server cannot run the program.
    """
    if next(run_at(url, Job("print(6 * 7)", "input", (b"",)), ProgramLimits())).output.strip() != b"42":
        raise SandboxUnavailable(f"the sandbox server at {url} failed to run a program that prints 42")


def _ask(url: str, source: str, language: str, stdin: str, limits: ProgramLimits) -> Any:
    asked = {
        "code": source,
        "language": language,
        "stdin": stdin,
        "run_timeout": limits.cpu_seconds,
        "compile_timeout": limits.cpu_seconds,
    }
    asked["memory_limit_MB"] = limits.memory_mib
    address = url if url.rstrip("/").endswith("/run_code") else f"{url.rstrip('/')}/run_code"
    request = urllib.request.Request(address, json.dumps(asked).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=limits.cpu_seconds + ANSWER_SECONDS) as response:
            answer = json.loads(response.read((limits.output_mib + 1) * MIB))
    except (OSError, ValueError) as error:
        raise SandboxUnavailable(f"no answer from the sandbox server at {address}: {error}") from error
    if not isinstance(answer, dict) or answer.get("status") not in ("Success", "Failed"):
        said = answer.get("message") if isinstance(answer, dict) else answer
        raise SandboxUnavailable(f"the sandbox server at {address} failed: {str(said)[:NOTE_BYTES]}")
    return answer


def _outcome(answer: Any) -> Outcome:
    result = answer.get("run_result") or {}
    lines = [line for line in str(result.get("stderr") or "").splitlines() if line.strip()]
    note, spent = (lines[-1] if lines else "")[:NOTE_BYTES], float(result.get("execution_time") or 0.0)
    output = str(result.get("stdout") or "").encode("utf-8", "replace")
    if answer["status"] == "Success":
        return Outcome(CaseEnd.OK, spent, output, "")
    if result.get("status") == "TimeLimitExceeded":
        return Outcome(CaseEnd.WALL_TIME, spent, output, note)
    syntax = note.startswith(("SyntaxError", "IndentationError", "TabError"))
    return Outcome(CaseEnd.COMPILE_ERROR if syntax else CaseEnd.FAILED, spent, output, note)
