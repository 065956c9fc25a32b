"""Signs of a process's progress: the stages in its log, and its CPU time and memory according to the kernel."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from roll.system import signs
from roll.system.signs import MARK, Activity, Usage, announce, cpu_seconds, process_activity
from tests import limits


def test_last_stage_of_log_is_read_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "actor_train-0.log"
    assert process_activity(None, log, 0) == signs.ProcessActivity(None, 0, None, False), "there is no log yet"
    announce("loading the model")
    told = capsys.readouterr().out
    log.write_text(f"of an earlier process\n{MARK}ready\n")
    begin = log.stat().st_size
    with log.open("a") as stream:
        stream.write(f"{told}a library prints\n(EngineCore pid=7) {MARK}compiling\nmore\n")
    found = process_activity(None, log, begin)
    assert found.stage == "compiling" and found.end == log.stat().st_size
    assert process_activity(None, log, found.end).stage is None
    log.write_text(f"{MARK}begun anew\n")
    assert process_activity(None, log, found.end).stage == "begun anew"


def test_cpu_seconds_include_ended_children() -> None:
    before, here = cpu_seconds([os.getpid()]), os.times()
    assert before is not None and before == pytest.approx(sum(here[:4]), abs=0.2), (
        "the same clocks, read in another way"
    )
    subprocess.run([sys.executable, "-c", "sum(range(10_000_000))"], check=True, timeout=limits.PROCESS)
    after = process_activity(os.getpid(), Path("none"), 0).usage
    assert after is not None and after.cpu_seconds > before
    assert after.resident > 1 << 20
    assert cpu_seconds([]) is None and process_activity(2**22 + 1, Path("none"), 0).usage is None


def test_a_sign_reads_as_a_line() -> None:
    assert str(Activity("critic", "process started")) == "critic: process started"
    usage = Usage(1.0, 1 << 30) + Usage(2.0, 1 << 29)
    assert str(Activity("critic", "training", usage, "3 of 4")) == "critic: training, 3 of 4, 3.0 s of CPU, 1.50 GiB"
