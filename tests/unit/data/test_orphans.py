"""If a run is killed while it prepares rows, the processes that it forked end, too, and release the locks that they
inherited.
"""

from __future__ import annotations

import fcntl
import subprocess
import sys
from pathlib import Path
from typing import BinaryIO

from tests import limits

PREPARES = """
import fcntl, os, sys, time
import datasets
from roll.data import tables

def fork(*_, **__):
    hear, say = os.pipe()
    for _ in range(2):  # like the pool of `map` and its manager, which do not notice that this process dies
        if os.fork() == 0:
            os.write(say, b".")
            time.sleep(3600)
            os._exit(0)
    for _ in range(2):
        os.read(hear, 1)
    os.kill(os.getpid(), 9)

lock = open(sys.argv[1], "wb")
fcntl.flock(lock, fcntl.LOCK_EX)
datasets.Dataset.map = fork
rows = datasets.Dataset.from_dict({"row": ["{}"]})
tables._raw_table = lambda *_: rows
data_args = type("DataConfig", (), {"preprocessing_num_workers": 2})()
tables._build(tables.Path(sys.argv[1]).with_suffix(".table"), [], type("Preparation", (), {"data_args": data_args})())
"""


def test_killed_preparation_leaves_no_lock(tmp_path: Path) -> None:
    file, said = tmp_path / "run.lock", tmp_path / "said"
    with said.open("wb") as stream:  # not a pipe, because forked processes would keep it open
        command = [sys.executable, "-c", PREPARES, str(file)]
        done = subprocess.run(command, stdout=stream, stderr=stream, timeout=limits.PROCESS, check=False)
    assert done.returncode == -9, said.read_text()
    with file.open("rb") as lock:
        limits.until(lambda: takes(lock), "no forked process holds the lock of the run", limits.END)


def takes(lock: BinaryIO) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
