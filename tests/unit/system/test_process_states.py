"""Stopped and ended processes are recognised by their state in the kernel; busy ones are not reported."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from roll.system import tree as process_states
from roll.system.tree import Problem, ProcessFinding, end_family, find_stopped
from tests import limits

PARENT = (
    "import subprocess, sys; child = subprocess.Popen(['sleep', '3600']); print(child.pid, flush=True); child.wait()"
)


@pytest.fixture
def family() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process and the id of its child."""
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        yield parent, child
        end_family(parent.pid)
        if psutil.pid_exists(child):
            os.kill(child, signal.SIGKILL)


def test_stopped_process_is_found_until_it_continues(family: tuple[subprocess.Popen[str], int]) -> None:
    parent, child = family
    asked = {parent.pid: True, child: False}
    assert find_stopped(asked) == {}
    os.kill(child, signal.SIGSTOP)
    limits.until(lambda: find_stopped({child: False}) != {}, "the child is stopped")
    assert find_stopped(asked) == {child: ProcessFinding(Problem.STOPPED, child)}, (
        "a process that is examined itself does not count as a child"
    )
    assert find_stopped({parent.pid: True}) == {parent.pid: ProcessFinding(Problem.STOPPED, child)}
    assert find_stopped({parent.pid: False}) == {}, "its children do not count"
    os.kill(parent.pid, signal.SIGSTOP)
    limits.until(
        lambda: find_stopped({parent.pid: True}) == {parent.pid: ProcessFinding(Problem.STOPPED, parent.pid)},
        "the process itself comes first",
    )
    os.kill(child, signal.SIGCONT)
    os.kill(parent.pid, signal.SIGCONT)
    limits.until(lambda: find_stopped(asked) == {}, "both run again")


def test_a_stopped_family_is_ended(family: tuple[subprocess.Popen[str], int]) -> None:
    parent, child = family
    os.kill(parent.pid, signal.SIGSTOP)
    os.kill(child, signal.SIGSTOP)
    end_family(parent.pid)
    limits.until(
        lambda: find_stopped({parent.pid: True}) == {parent.pid: ProcessFinding(Problem.GONE, parent.pid)},
        "it is gone, reaped or not",
    )
    parent.wait(limits.END)
    limits.until(lambda: child in find_stopped({child: False}), "its child is gone")
    end_family(parent.pid)  # a process that is gone is no error


def test_debugged_and_busy_processes_are_not_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_states, "PROC", tmp_path)
    for pid, (state, parent) in enumerate([("t", 0), ("D", 0), ("R", 0), ("S", 0), ("Z", 0), ("T", 3)], start=1):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "stat").write_text(f"{pid} (a ) T (b) {state} {parent} 1 1 0")
    (tmp_path / "7").mkdir()  # it ended before its state was read
    (tmp_path / "meminfo").touch()
    gone = {pid: ProcessFinding(Problem.GONE, pid) for pid in (5, 7)}
    assert find_stopped(dict.fromkeys((1, 2, 4, 5, 7), True)) == gone
    assert find_stopped({3: True}) == {3: ProcessFinding(Problem.STOPPED, 6)}
