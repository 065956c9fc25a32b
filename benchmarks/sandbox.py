"""Measures how many programs per second a machine judges in the sandbox of `code_sandbox`, and checks that nothing is
left behind.

    python benchmarks/sandbox.py --programs 1000 --workers 2

A quarter of the programs is right, a quarter is wrong, a quarter forks and a quarter fills its memory. Half of them are
scripts with three cases, the others functions with three tests. The status is 1 if a verdict is wrong, or if a process,
a mount, a control group or a file is left behind.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from roll.rewards.functions.code_sandbox import code_sandbox
from roll.rewards.sandbox.bubblewrap import START
from roll.types import Prompt, RewardOutcome

SCRIPT = "```python\nn = int(input())\n{}\nprint(n * {})\n```"
FUNCTION = "```python\ndef double(n):\n    {}\n    return n * {}\n```"
SPOILT = ("pass", "pass", "import os; os.fork()", "kept = bytearray(1 << 31)")
INPUTS = (1, 2, 30)


def case(index: int) -> tuple[str, dict[str, Any], float]:
    """Return a response, its row, and the expected reward."""
    kind, script = index % 4, index // 4 % 2 == 0
    factor = 3 if kind == 1 else 2
    response = (SCRIPT if script else FUNCTION).format(SPOILT[kind], factor)
    if script:
        row = {"case_type": "input", "test_cases": [{"stdin": str(n), "expected_stdout": str(2 * n)} for n in INPUTS]}
    else:
        row = {"case_type": "assert", "test_cases": [{"assert_code": f"assert double({n}) == {2 * n}"} for n in INPUTS]}
    return response, row, float(kind == 0)


def judge(index: int) -> bool:
    """Whether the verdict on a program is right."""
    response, row, expected = case(index)
    result = code_sandbox(Prompt(index, None, "", "code", row), response, row)  # type: ignore[arg-type]  # the tokens are not used
    return result.outcome is RewardOutcome.SCORED and result.value == expected


def left(temporary: Path) -> dict[str, set[str]]:
    """Return the processes, mounts, control groups and files that sandboxes may leave behind."""
    return {
        "processes": {str(process.pid) for process in psutil.process_iter() if START in _command(process)},
        "mounts": set(Path("/proc/self/mounts").read_text().splitlines()),
        "control groups": {str(path) for own in _control_groups() for path in own.rglob("*") if path.is_dir()},
        "files": {str(path) for path in temporary.rglob("*")},
    }


def _control_groups() -> list[Path]:
    """Return the control groups of this process, of version 1 or 2."""
    root, own = Path("/sys/fs/cgroup"), []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        own.append(root / controllers.removeprefix("name=") / path.lstrip("/"))
    return [path for path in own if path != root and path.is_dir()]


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=2)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="roll-sandboxes-") as folder:
        tempfile.tempdir = folder
        before = left(Path(folder))
        with ProcessPoolExecutor(chosen.workers) as workers:
            list(workers.map(judge, range(2 * chosen.workers)))  # not timed: imports, and the trial of the sandbox
            begin = time.perf_counter()
            right = sum(workers.map(judge, range(chosen.programs), chunksize=4))
            seconds = time.perf_counter() - begin
        remains = {what: sorted(now - before[what]) for what, now in left(Path(folder)).items() if now - before[what]}
    print(
        f"{chosen.programs} programs of {len(INPUTS)} cases in {seconds:.1f} s by {chosen.workers} workers on "
        f"{os.cpu_count()} cores:"
    )
    print(
        f"{chosen.programs / seconds:.1f} programs per second; {right} correct verdicts; left behind: "
        f"{remains or 'nothing'}"
    )
    return int(right != chosen.programs or bool(remains))


if __name__ == "__main__":
    sys.exit(main())
