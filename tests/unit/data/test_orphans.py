"""Who is killed takes along what it forked, and the locks that this held."""

from __future__ import annotations

import fcntl
import subprocess
import sys
import time
from pathlib import Path

PREPARES = """
import fcntl, os, sys, time
import datasets
from roll.data import tables

def fork(*_, **__):
    for _ in range(2):  # as its pool and its pool's manager do, which do not see the death of this process
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
    time.sleep(0.2)
    os.kill(os.getpid(), 9)

lock = open(sys.argv[1], "wb")
fcntl.flock(lock, fcntl.LOCK_EX)
datasets.Dataset.map = fork
rows = datasets.Dataset.from_dict({"row": ["{}"]})
tables._raw_table = lambda *_: rows
data_args = type("DataArgs", (), {"preprocessing_num_workers": 2})()
tables._build(tables.Path(sys.argv[1]).with_suffix(".table"), [], type("Preparation", (), {"data_args": data_args})())
"""


def test_rows_that_are_prepared_side_by_side_hold_no_lock_of_a_run_that_was_killed(tmp_path: Path) -> None:
    file, said = tmp_path / "run.lock", tmp_path / "said"
    with said.open("wb") as stream:  # not a pipe, which what was forked would keep open
        done = subprocess.run([sys.executable, "-c", PREPARES, str(file)], stdout=stream, stderr=stream, timeout=120, check=False)
    assert done.returncode == -9, said.read_text()
    deadline = time.monotonic() + 5
    with file.open("rb") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                assert time.monotonic() < deadline, "a forked process holds the lock of the run"
                time.sleep(0.05)
