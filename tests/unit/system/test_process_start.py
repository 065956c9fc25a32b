"""The start of a process, beside readings of the clock before and after it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from roll.system.process_start import boot_time, process_start

TICK = 0.01


@pytest.mark.parametrize("name", ["sleep", "a name) S 1 (2", "two\nlines"])
def test_start_is_between_readings_of_the_clock(tmp_path: Path, name: str) -> None:
    program = shutil.copy(shutil.which("sleep") or "", tmp_path / name)
    before = time.clock_gettime(time.CLOCK_BOOTTIME)
    with subprocess.Popen([program, "3600"]) as process:
        after = time.clock_gettime(time.CLOCK_BOOTTIME)
        started = process_start(process.pid)
        assert before - TICK <= started <= after
        assert boot_time() + started == pytest.approx(psutil.Process(process.pid).create_time(), abs=1.0 + TICK)
        process.kill()


def test_ended_process_has_no_start() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    with pytest.raises(ProcessLookupError, match=str(process.pid)):
        process_start(process.pid)
