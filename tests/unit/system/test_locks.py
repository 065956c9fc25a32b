"""`roll.system.locks`: a lock that is held keeps others out, and a killed process holds none."""

from __future__ import annotations

import fcntl
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from roll.system.locks import LockHeld, locked, take
from tests import limits

HOLDS = """
import sys, time
from pathlib import Path
from roll.system.locks import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_lock_keeps_others_out_until_it_is_released(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with locked(path):
        with pytest.raises(LockHeld, match=str(path)), locked(path):
            pass
        with path.open("rb") as file:
            assert not take(file)
    with path.open("rb") as file:
        assert take(file)
        with pytest.raises(LockHeld), locked(path, limits.LOOK):
            pass
    with locked(path):
        assert path.exists()


def test_whoever_waits_gets_the_lock_once_it_is_released(tmp_path: Path) -> None:
    path, entered = tmp_path / "lock", threading.Event()

    def wait() -> None:
        with locked(path, limits.CALL):
            entered.set()

    with locked(path):
        waiting = threading.Thread(target=wait)
        waiting.start()
        assert not entered.wait(limits.EXPIRY)
    waiting.join(limits.CALL)
    assert entered.is_set()


def test_a_killed_process_holds_no_lock(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with subprocess.Popen([sys.executable, "-c", HOLDS, str(path)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with pytest.raises(LockHeld), locked(path):
            pass
        holder.kill()
    with locked(path):
        pass


def test_a_file_system_without_locks_is_used_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unsupported(file: object, operation: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    path = tmp_path / "lock"
    with locked(path), locked(path):
        assert "has no locks" in caplog.text
    with path.open("rb") as file:
        assert not take(file)
