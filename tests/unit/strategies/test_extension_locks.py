"""Locks in torch's extension cache: finding and naming their holder, and removing those that have none."""

from __future__ import annotations

import logging
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from torch.utils.cpp_extension import get_default_build_root

from roll.training.deepspeed import extension_locks as module
from roll.training.deepspeed.extension_locks import (
    LOCK,
    LONGEST_COMPILATION,
    OWNER,
    extension_cache,
    extension_locks,
    read_lock,
    turn_to_compile,
)
from tests import limits

ME = "actor_train rank 0"
HOLDS = """
import os, sys, time
os.open(sys.argv[1], os.O_CREAT | os.O_EXCL)  # as torch's FileBaton does
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of an op in an extension cache that only this test uses."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    folder = tmp_path / "py311_cpu" / "cpu_adam"
    folder.mkdir(parents=True)
    return folder


@contextmanager
def held(lock: Path) -> Iterator[subprocess.Popen[str]]:
    """Start a process that holds the lock, and kill it at the end of the context."""
    with subprocess.Popen([sys.executable, "-c", HOLDS, str(lock)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.kill()


def on_network_mount(monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = [SimpleNamespace(mountpoint="/", fstype="ext4"), SimpleNamespace(mountpoint="/", fstype="nfs4")]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: mounts)


def age(folder: Path, seconds: float) -> None:
    """Make the folder and its files older."""
    for path in (*folder.iterdir(), folder):
        earlier = path.stat().st_mtime - seconds
        os.utime(path, (earlier, earlier))


def test_the_cache_is_where_torch_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    for variable in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(variable, str(tmp_path / variable))
        assert str(extension_cache()) == get_default_build_root()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "ops"))
    assert extension_cache() == tmp_path / "ops"


def test_unheld_lock_is_removed_without_waiting(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    lock = folder / LOCK
    lock.touch()
    assert extension_locks(extension_cache()) == [module.ExtensionLock(lock, None)]
    with turn_to_compile(folder, 0.0, ME):
        assert not lock.exists()
    [record] = caplog.records
    assert record.levelno == logging.WARNING and record.getMessage().startswith(f"{ME} removed a lock: {lock} ")
    assert extension_locks(extension_cache()) == []


def test_lock_of_living_holder_stays_until_killed(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    lock = folder / LOCK
    with held(lock) as process:
        name = rf"process {process.pid} \(.*python.* -c .*\) holds {lock}"
        with (
            pytest.raises(TimeoutError, match=f"{ME} waited 0 s .* cpu_adam: {name}; end that"),
            turn_to_compile(folder, 0.0, ME),
        ):
            pass
        assert lock.exists()
        assert f"{ME} waits to compile cpu_adam: process {process.pid} (" in caplog.text
    with turn_to_compile(folder, 0.0, ME):
        assert not lock.exists()


def test_waiter_continues_when_holder_is_killed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with held(folder / LOCK) as process:
        monkeypatch.setattr(module.LOG, "warning", lambda *_: process.kill())  # kill the holder when the wait is logged
        with turn_to_compile(folder, 60.0, ME):
            assert not (folder / LOCK).exists()


def test_surviving_build_tool_still_holds_the_lock(folder: Path, tmp_path: Path) -> None:
    ninja = tmp_path / "ninja"
    shutil.copy("/bin/sleep", ninja)
    lock = folder / LOCK
    lock.touch()
    with subprocess.Popen([ninja, "60"], cwd=folder) as process:
        try:
            limits.until(
                lambda: psutil.Process(process.pid).cmdline() == [str(ninja), "60"],
                "the process runs the copy of sleep",
            )
            with (
                pytest.raises(TimeoutError, match=rf"process {process.pid} \({ninja} 60\) holds {lock}"),
                turn_to_compile(folder, 0.0, ME),
            ):
                pass
        finally:
            process.kill()
    assert read_lock(lock) == module.ExtensionLock(lock, None)


def test_where_a_process_may_be_elsewhere_age_decides(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = folder / LOCK
    lock.touch()
    on_network_mount(monkeypatch)
    with (
        pytest.raises(TimeoutError, match="another host, container"),
        turn_to_compile(folder, 0.0, ME),
    ):
        pass
    age(folder, LONGEST_COMPILATION + 60)
    (folder / "cpu_adam.o").touch()
    assert read_lock(lock) != module.ExtensionLock(lock, None), (
        "a file in the folder is new, so a compilation may be in progress"
    )
    age(folder, LONGEST_COMPILATION + 60)
    with turn_to_compile(folder, 0.0, ME):
        assert not lock.exists()


@pytest.mark.parametrize("hours", [-24, -1, 2, 24])
def test_age_is_that_of_the_shares_clock(hours: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = folder / LOCK
    lock.touch()
    on_network_mount(monkeypatch)
    own = lock.stat().st_mtime + 3600 * hours
    monkeypatch.setattr(module.time, "time", lambda: own)
    found = read_lock(lock)
    assert found and found.holder, "another host compiles, whatever time it is here"
    age(folder, LONGEST_COMPILATION + 60)
    assert read_lock(lock) == module.ExtensionLock(lock, None)
    assert not list(folder.parent.glob(".clock-*"))


def test_lock_of_other_user_is_judged_by_age(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = folder / LOCK
    lock.touch()
    monkeypatch.setattr(os, "geteuid", lambda: lock.stat().st_uid + 1)
    found = read_lock(lock)
    assert found and found.holder and "user" in found.holder
    age(folder, LONGEST_COMPILATION + 60)
    assert read_lock(lock) == module.ExtensionLock(lock, None)


def test_network_mount_lock_is_judged_by_its_record(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_network_mount(monkeypatch)
    with turn_to_compile(folder, 0.0, ME):
        (folder / LOCK).touch()
        record = (folder / OWNER).read_text()
        assert f"process {os.getpid()} (" in record
    assert not (folder / OWNER).exists()
    (folder / OWNER).write_text(record)  # a killed process leaves this file
    assert read_lock(folder / LOCK) == module.ExtensionLock(folder / LOCK, None)
    (folder / OWNER).write_text("node7, pid:[4026531836]\nprocess 12 (ray::Process.build)\n")
    found = read_lock(folder / LOCK)
    assert found and str(found) == f"process 12 (ray::Process.build) on node7, pid:[4026531836] holds {folder / LOCK}"


def _compile(folder: Path, number: int) -> None:
    """Stand in for a compilation. Fail if another one is in progress."""
    with turn_to_compile(folder, limits.CALL, ME):
        (folder / "building").touch(exist_ok=False)
        time.sleep(0.2)
        (folder / "building").unlink()
        (folder / f"built{number}").touch()


def test_one_process_compiles_at_a_time(folder: Path) -> None:
    processes = [
        multiprocessing.get_context("fork").Process(target=_compile, args=(folder, number)) for number in range(4)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(limits.CALL)
    assert [process.exitcode for process in processes] == [0] * 4
    assert len(list(folder.glob("built*"))) == 4


def test_process_holding_the_turn_is_named(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    other = folder.with_name("async_io")
    with turn_to_compile(folder, 0.0, ME):
        with (
            pytest.raises(TimeoutError, match=f"async_io: another process .*{module.TURN}"),
            turn_to_compile(other, 0.0, ME),
        ):
            pass
        with held(folder / LOCK) as process:
            with (
                pytest.raises(
                    TimeoutError, match=rf"to compile async_io: process {process.pid} \(.*\) holds {folder / LOCK}"
                ),
                turn_to_compile(other, 0.0, ME),
            ):
                pass
            assert f"waits to compile async_io: process {process.pid} (" in caplog.text
