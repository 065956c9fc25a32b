"""The changes that a worker process makes to its environment at its start."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from roll.ray.process import _find_programs, _use_own_temporary
from roll.system.own_folder import LOCK
from tests import limits


def test_tmpdir_missing_on_this_host_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    _use_own_temporary()
    assert os.environ["TMPDIR"] == str(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "of-another-host"))
    _use_own_temporary()
    own = Path(os.environ["TMPDIR"])
    assert own.parent != tmp_path and (own / LOCK).is_file() and tempfile.gettempdir() == str(own)


def test_programs_beside_the_interpreter_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "ninja-of-the-environment"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert shutil.which(program.name) is None
    _find_programs()
    assert shutil.which(program.name) == str(program)
    assert os.environ["PATH"].endswith("/usr/bin:/bin")


def test_shared_memory_does_not_unblock_sigterm() -> None:
    code = """
import signal
from multiprocessing import resource_tracker
from roll.ray.process import keep_signal_mask
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
keep_signal_mask()
resource_tracker.ensure_running()
print(signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, ()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=limits.PROCESS)
    assert done.stdout == "True\n", done.stderr
