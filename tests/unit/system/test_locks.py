"""`roll.system.own_folder`: a lock that is held keeps others out, and a killed process holds none."""

from __future__ import annotations

import fcntl
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from roll.system.own_folder import LockHeld, holding_lock, try_lock
from tests import limits

HOLDS = """
import sys, time
from pathlib import Path
from roll.system.own_folder import holding_lock
with holding_lock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_lock_excludes_others_until_released(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with holding_lock(path):
        with pytest.raises(LockHeld, match=str(path)), holding_lock(path):
            pass
        with path.open("rb") as file:
            assert not try_lock(file)
    with path.open("rb") as file:
        assert try_lock(file)
        with pytest.raises(LockHeld), holding_lock(path, limits.LOOK):
            pass
    with holding_lock(path):
        assert path.exists()


def test_waiter_gets_lock_once_released(tmp_path: Path) -> None:
    path, entered = tmp_path / "lock", threading.Event()

    def wait() -> None:
        with holding_lock(path, limits.CALL):
            entered.set()

    with holding_lock(path):
        waiting = threading.Thread(target=wait)
        waiting.start()
        assert not entered.wait(limits.EXPIRY)
    waiting.join(limits.CALL)
    assert entered.is_set()


def test_a_killed_process_holds_no_lock(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with subprocess.Popen([sys.executable, "-c", HOLDS, str(path)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with pytest.raises(LockHeld), holding_lock(path):
            pass
        holder.kill()
    with holding_lock(path):
        pass


def test_a_file_system_without_locks_is_used_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unsupported(file: object, operation: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    path = tmp_path / "lock"
    with holding_lock(path), holding_lock(path):
        assert "has no locks" in caplog.text
    with path.open("rb") as file:
        assert not try_lock(file)
