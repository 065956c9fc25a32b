"""Runs programs on a SandboxFusion server (`POST /run_code`). Unlike roll's own sandbox, it runs tests in the process
of the program.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from functools import cache
from typing import Any

from roll.rewards.sandbox.bubblewrap import SandboxUnavailable
from roll.rewards.sandbox.inside.supervisor import NOTE_BYTES
from roll.rewards.sandbox.program import MIB, CaseEnd, Job, Outcome, ProgramLimits

ANSWER_SECONDS = 30.0
"""Seconds for queueing and startup on the server, in addition to the program's CPU limit."""
CALL_CHECK = "\ncheck({entry})\n"


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
