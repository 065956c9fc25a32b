"""How sandboxes of programs end: with whoever made them, and without leaving processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import psutil
import pytest

from roll.rewards.sandbox import program
from roll.rewards.sandbox.bubblewrap import find_interpreter
from roll.rewards.sandbox.program import CaseEnd, Job, ProgramLimits, run_program
from roll.system.orphans import is_alive
from roll.types import RewardOutcome, RewardResult
from tests.limits import until
from tests.unit.rewards.running import children_of, descendants, process, run
from tests.unit.rewards.test_code_sandbox import PROMPT, ROOT, asserts, fenced

ENDINGS = {
    "right": "def f(): return 1",
    "wrong": "def f(): return 2",
    "ends itself": "import os\nos._exit(3)",
    "no Python": "def f(:",
    "uses up its time": "def f():\n    while True: pass",
    "waits": "import time\ntime.sleep(1000)",
    "writes endlessly": "while True: print('x' * 1000)",
}
LIMITS = {"cpu_seconds": 1, "wall_seconds": 3, "output_mib": 1}


@pytest.mark.parametrize("sandbox", ["bubblewrap", "none"])
@pytest.mark.parametrize("kind", ["assert", "input"])
def test_programs_leave_no_processes(kind: str, sandbox: str) -> None:
    """A reward process adopts what its programs leave, and would be ended for what adds up to `max_processes`."""
    cases = {"cases": "first_failure", "sandbox": sandbox, **LIMITS}
    row = asserts("assert f() == 1", "assert f() < 2")
    if kind == "input":
        row = {"case_type": kind, "test_cases": json.dumps([{"stdin": "", "expected_stdout": "1"}] * 2)}

    async def go() -> tuple[list[RewardResult], list[int]]:
        async with process(reward="code_sandbox", reward_args=cases, max_processes=8) as rewards:
            before = len(children_of(b"roll.rewards.child"))
            results = await rewards.score(replace(PROMPT, row=row), [fenced(one) for one in ENDINGS.values()] * 2)
            [child] = children_of(b"roll.rewards.child")[before - 1 :]
            return results, descendants(child)

    results, left = run(go())
    assert [result.outcome for result in results] == [RewardOutcome.SCORED] * len(results)
    assert [result.value == 1 for result in results] == [kind == "assert", *[False] * 6] * 2
    assert left == []


def test_a_stopped_sandbox_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "END_SECONDS", 0.5)
    others = {one.pid for one in beneath(os.getpid())}
    waits = Job("import sys, time\nif sys.stdin.read(): time.sleep(1000)", "input", (b"", b"x"))
    outcomes: Any = run_program(waits, ProgramLimits(), find_interpreter(None))
    assert next(outcomes).ending == CaseEnd.OK
    sandbox = [one for one in beneath(os.getpid()) if one.pid not in others]
    for one in sandbox:
        one.suspend()
    outcomes.close()
    assert len(sandbox) >= 2 and not any(map(is_alive, sandbox))


def test_a_sandbox_ends_with_whoever_made_it() -> None:
    made = "from tests.unit.rewards.escapes import *; go_on('import time; time.sleep(1000)', sleeps=False)"
    maker = subprocess.Popen(
        [sys.executable, "-c", made], cwd=ROOT, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    )
    until(lambda: len(beneath(maker.pid)) > 2, "bubblewrap, supervisor and program of the sandbox run")
    sandbox = beneath(maker.pid)
    maker.kill()
    maker.wait()
    until(lambda: not any(process.is_running() for process in sandbox), "all processes of the sandbox have ended")


def beneath(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)
