"""Commands that run side by side: their slots, output, statuses and signals."""

from __future__ import annotations

import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from roll import pipeline as program
from roll.errors import ConfigError
from roll.runs.side_by_side import Command, outcome, run_side_by_side, slot_environments
from tests import limits
from tests.faults import coded

PYTHON = [sys.executable, "-c"]
SWEEP = ["--config-name", "tiny/tiny_warm_up", "--multirun", "seed=1,2"]


def command(text: str) -> Command:
    return Command([*PYTHON, text])


def test_output_and_status_belong_to_each_command() -> None:
    lines: list[str] = []
    texts = ["print('a')", "import sys; print('b', flush=True); sys.exit(3)", "print('c', end='')"]
    assert run_side_by_side([command(text) for text in texts], [{}, {}], lines.append) == [0, 3, 0]
    assert sorted(lines) == ["[0] a", "[1] b", "[2] c"]


def test_command_reads_what_it_is_given() -> None:
    lines: list[str] = []
    reader = [*PYTHON, "import pickle, sys; print(pickle.load(sys.stdin.buffer))"]
    given = pickle.dumps("x" * 100_000)
    assert run_side_by_side([Command(reader, given)], [{}], lines.append) == [0]
    assert lines == [f"[0] {'x' * 100_000}"]


def test_running_commands_have_different_slots(tmp_path: Path) -> None:
    text = (
        "import os, pathlib, time\n"
        f"mine = pathlib.Path({str(tmp_path)!r}) / os.environ['SLOT']\n"
        "mine.mkdir()\ntime.sleep(0.2)\nmine.rmdir()\n"
    )
    slots = [{"SLOT": "a"}, {"SLOT": "b"}]
    assert run_side_by_side([command(text)] * 5, slots, print) == [0] * 5


def test_gpus_of_slots_are_disjoint() -> None:
    assert slot_environments(3, 0, {}, 0) == [{}, {}, {}]
    assert slot_environments(2, 2, {}, 4) == [{"CUDA_VISIBLE_DEVICES": "0,1"}, {"CUDA_VISIBLE_DEVICES": "2,3"}]
    assert slot_environments(1, 2, {"CUDA_VISIBLE_DEVICES": "7,5"}, 8) == [{"CUDA_VISIBLE_DEVICES": "7,5"}]


@pytest.mark.parametrize(
    ("environment", "present", "code"),
    [({}, 3, "too_large"), ({"CUDA_VISIBLE_DEVICES": "1"}, 8, "too_large"), ({"RAY_ADDRESS": "x"}, 8, "not_supported")],
)
def test_shared_gpus_are_refused(environment: dict[str, str], present: int, code: str) -> None:
    with pytest.raises(ConfigError) as raised:
        slot_environments(2, 2, environment, present)
    assert coded(raised.value.faults) == [(code, "--parallel")]


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--config-name", "tiny/tiny_warm_up", "--parallel", "2", "dry_run=true"], "only one job"),
        ([*SWEEP, "--parallel", "0"], "below 1"),
        ([*SWEEP, "--parallel", "two"], "invalid int"),
    ],
)
def test_number_of_runs_is_checked(words: Sequence[str], code: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(words) == 2
    assert code in capsys.readouterr().err


def parent(folder: Path) -> subprocess.Popen[bytes]:
    """Start a process that runs two commands, of which each writes its id and waits for a signal, and a third later."""
    waits = (
        "import os, pathlib, signal, sys, time\n"
        "signal.signal(signal.SIGINT, lambda *_: sys.exit(130))\n"
        f"(pathlib.Path({str(folder)!r}) / str(os.getpid())).touch()\n"
        "time.sleep(1000)\n"
    )
    text = (
        "from roll.runs.side_by_side import Command, run_side_by_side\n"
        f"waits = Command([{sys.executable!r}, '-c', {waits!r}])\n"
        "print(run_side_by_side([waits] * 3, [{}, {}], print), flush=True)\n"
    )
    return subprocess.Popen([*PYTHON, text], stdout=subprocess.PIPE)


def children(folder: Path) -> list[int]:
    """Wait until both commands run, and return their ids."""
    while len(found := [int(file.name) for file in folder.iterdir()]) < 2:
        time.sleep(0.05)
    return found


def test_signal_ends_all_and_starts_none(tmp_path: Path) -> None:
    process = parent(tmp_path)
    begun = children(tmp_path)
    process.send_signal(signal.SIGINT)
    printed, _ = process.communicate(timeout=limits.PROCESS)
    assert printed.decode().strip() == "[130, 130, None]" and children(tmp_path) == begun
    assert not any(psutil.pid_exists(one) for one in begun)


def test_killed_parent_leaves_no_command(tmp_path: Path) -> None:
    process = parent(tmp_path)
    begun = [psutil.Process(one) for one in children(tmp_path)]
    process.kill()
    process.wait(limits.PROCESS)
    gone, alive = psutil.wait_procs(begun, timeout=limits.PROCESS)
    assert len(gone) == 2 and not alive


def test_outcomes_are_told_apart() -> None:
    assert len({outcome(status) for status in (None, 0, 3, 130, -9)}) == 5


def test_failed_job_does_not_stop_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The run folder of the first job cannot be made; the second is a dry run."""
    (tmp_path / "0").write_text("a file")
    jobs = program.jobs_of([*SWEEP, f"output_dir={tmp_path}/run_${{hydra:job.num}}", "dry_run=true"])
    changed = {"dry_run": False, "output_dir": str(tmp_path / "0" / "run")}
    broken = (jobs[0][0].model_copy(update=changed), jobs[0][1])
    statuses = program._run_parallel([broken, jobs[1]], 2)
    assert statuses[0] not in (0, None) and statuses[1] == 0
    printed = capsys.readouterr().out
    assert "[1] " in printed and "job 0: failed" in printed and "job 1: done" in printed
