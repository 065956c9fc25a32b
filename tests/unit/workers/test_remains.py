"""What a killed run leaves in shared memory is recorded, and removed by the next."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from pathlib import Path

import pytest

from roll.workers import cluster
from roll.workers.remains import SHARED_MEMORY, Remains

HOLDS = """
import sys, time
from multiprocessing.shared_memory import SharedMemory
from multiprocessing import resource_tracker
memory = SharedMemory(create=True, size=4096)
resource_tracker.unregister(memory._name, "shared_memory")  # as where the tracker is killed too
memory.buf[0] = 1
print(memory.name, flush=True)
time.sleep(60)
"""


def test_the_next_run_removes_what_a_killed_one_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = multiprocessing.Process(target=print)
    driver.start()
    driver.join()
    folder = tmp_path / f"{cluster.PREFIX}{driver.pid}-abc"
    folder.mkdir()
    with subprocess.Popen([sys.executable, "-c", HOLDS], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.pid
        name = holder.stdout.readline().strip()
        Remains(folder / f"actor_infer{cluster.RECORD}").look([holder.pid])
        holder.kill()
    file = SHARED_MEMORY / name
    assert file.exists()
    try:
        monkeypatch.setattr(cluster, "SHARED_MEMORY", tmp_path)
        cluster._sweep()
        assert not file.exists()
        assert not folder.exists()
    finally:
        file.unlink(missing_ok=True)


def test_a_record_that_names_other_files_removes_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = tmp_path / "mine"
    mine.write_text("kept")
    folder = tmp_path / f"{cluster.PREFIX}999999999-abc"
    folder.mkdir()
    (folder / f"actor_infer{cluster.RECORD}").write_text(f"{mine}\n/dev/shm/../{mine}\n")
    monkeypatch.setattr(cluster, "SHARED_MEMORY", tmp_path)
    cluster._sweep()
    assert mine.exists() and not folder.exists()
