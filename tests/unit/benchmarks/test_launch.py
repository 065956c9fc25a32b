"""The processes that a benchmark starts end with it, and get time to clean up."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from benchmarks.launch import end

CHILD = """
import pathlib, signal, sys, time
def leave(*_):
    pathlib.Path(sys.argv[1]).touch()
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
print("ready", flush=True)
time.sleep(600)
"""


def test_interrupted_command_may_end_in_order(tmp_path: Path) -> None:
    command = [sys.executable, "-c", CHILD, str(tmp_path / "left")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        end(process)
    assert process.returncode == 0
    assert (tmp_path / "left").exists()
