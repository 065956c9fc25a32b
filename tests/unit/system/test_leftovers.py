"""Files that a killed run leaves in shared memory are recorded, and the next run removes them."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from roll.ray import cluster
from roll.system import caretaker
from roll.system.leftovers import CLOCK_SLACK, SHARED_MEMORY, Leftovers
from roll.system.orphans import is_alive
from roll.system.own_folder import LOCK, PREFIX, own_folder
from tests import limits

HOLDS = """
import sys, time
from multiprocessing.shared_memory import SharedMemory
from multiprocessing import resource_tracker
memory = SharedMemory(create=True, size=4096)
resource_tracker.unregister(memory._name, "shared_memory")  # as if the tracker were killed, too
memory.buf[0] = 1
print(memory.name, flush=True)
time.sleep(3600)
"""

SEMAPHORE = """
import multiprocessing, time
from multiprocessing import resource_tracker
lock = multiprocessing.get_context("spawn").Lock()  # like the one that vLLM's executor makes for its workers
resource_tracker.unregister(lock._semlock.name, "semaphore")
print(f"sem.{lock._semlock.name[1:]}", flush=True)
time.sleep(3600)
"""


def left_by_a_run(parent: Path) -> Path:
    folder = parent / f"{PREFIX}999999999-abc"
    folder.mkdir()
    (folder / LOCK).touch()
    return folder


def test_folders_of_unseen_running_process_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This happens if two containers share /dev/shm or /tmp."""
    monkeypatch.setattr(cluster, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(os, "getpid", lambda: 999999999)
    with own_folder(tmp_path) as folder:
        assert folder.name.startswith("roll-999999999-")
        (folder / "bucket0.safetensors").write_text("weights")
        cluster._sweep()
        assert (folder / "bucket0.safetensors").exists()
    assert not folder.exists()


@pytest.mark.parametrize("program", [HOLDS, SEMAPHORE])
def test_next_run_removes_leftovers_of_killed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    folder = left_by_a_run(tmp_path)
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.pid
        name = holder.stdout.readline().strip()
        Leftovers(folder / f"actor_infer{cluster.RECORD}").record([holder.pid])
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


MAPS = """
import mmap, sys, time
maps = []
for name in sys.argv[1:]:
    with open(name, "r+b") as file:
        maps.append(mmap.mmap(file.fileno(), 0))
print("mapped", flush=True)
time.sleep(3600)
"""


def test_what_others_keep_in_shared_memory_stays() -> None:
    with (
        tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as name,
        tempfile.NamedTemporaryFile(dir=SHARED_MEMORY) as older,
    ):
        model = Path(name) / "model.safetensors"
        for file in (model, Path(older.name)):
            file.write_bytes(b"weights")
        time.sleep(2 * CLOCK_SLACK)  # so that the worker starts measurably later than the files were written
        with subprocess.Popen(
            [sys.executable, "-c", MAPS, model, older.name], stdout=subprocess.PIPE, text=True
        ) as worker:
            assert worker.stdout is not None and worker.stdout.readline() == "mapped\n"
            leftovers = Leftovers(Path(name) / "actor_infer.held")
            leftovers.record([worker.pid])
            worker.kill()
        leftovers.remove(limits.END)
        assert model.read_bytes() == Path(older.name).read_bytes() == b"weights"
        assert not (Path(name) / "actor_infer.held").exists()


def test_a_record_that_names_other_files_removes_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = tmp_path / "mine"
    mine.write_text("kept")
    folder = left_by_a_run(tmp_path)
    (folder / f"actor_infer{cluster.RECORD}").write_text(f"{mine}\n/dev/shm/../{mine}\n")
    monkeypatch.setattr(cluster, "SHARED_MEMORY", tmp_path)
    cluster._sweep()
    assert mine.exists() and not folder.exists()


KEEPS = """
import subprocess, sys
from pathlib import Path
from roll.system.own_folder import own_folder
with own_folder(Path(sys.argv[1])):
    child = subprocess.Popen([sys.executable, "-c", sys.argv[2]], stdout=subprocess.PIPE, text=True)
    print(child.pid, child.stdout.readline(), end="", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize(("program", "temporary"), [(HOLDS, "."), (SEMAPHORE, "."), (HOLDS, "another")])
def test_caretaker_removes_what_a_killed_worker_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, temporary: str
) -> None:
    recorded = threading.Event()

    def record(self: Leftovers, pids: Sequence[int]) -> None:
        record_really(self, pids)
        recorded.set()

    record_really = Leftovers.record
    monkeypatch.setattr(Leftovers, "record", record)
    words = [sys.executable, "-c", KEEPS, str(tmp_path), program]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        pid, name = worker.stdout.readline().split()
        child = psutil.Process(int(pid))
        said, say = os.pipe()
        caring = threading.Thread(target=caretaker.main, args=(said, tmp_path / temporary))
        caring.start()
        os.write(say, f"{worker.pid}\n".encode())
        os.close(say)
        assert recorded.wait(limits.CALL)
        assert (SHARED_MEMORY / name).exists() and is_alive(child) and list(tmp_path.iterdir())
        worker.kill()
    caring.join(limits.CALL)
    os.close(said)
    assert not caring.is_alive() and not list(tmp_path.iterdir())
    assert not (SHARED_MEMORY / name).exists() and not is_alive(child)


def test_caretaker_is_no_child_and_ends(tmp_path: Path) -> None:
    started = caretaker.Caretaker(tmp_path)
    watching = [one for one in psutil.process_iter(["cmdline"]) if str(tmp_path) in (one.info["cmdline"] or ())]
    assert watching and not {one.pid for one in watching} & {one.pid for one in psutil.Process().children(True)}
    started.close()
    psutil.wait_procs(watching, limits.END)
    assert not any(map(is_alive, watching))
