"""Commands whose output nobody reads, and which get signals at any time, tested as processes."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from roll.system.command import SIGNALS, run_command
from tests import limits

PRINTS = """
import logging, sys
from pathlib import Path
from rich.console import Console
from roll.system.command import run_command
logging.basicConfig(filename=sys.argv[1], level=logging.INFO)
def work():
    Console().print("ready")
    sys.stdin.readline()
    print("step")
    print("saved: here")
    print("warning", file=sys.stderr)
    Console().print("report")
sys.exit(run_command(work))
"""
SIGNALLED = """
import atexit, os, signal, sys, time
from roll.system.command import SIGNALS, run_command
number, phase = int(sys.argv[1]), sys.argv[2]
def send():
    os.kill(os.getpid(), number)
def work():
    if phase == "work":
        send()
    elif phase == "cleanup":
        try:
            send()
        finally:
            send()
atexit.register(lambda: [os.kill(os.getpid(), number) for number in SIGNALS])
sys.exit(run_command(work))
"""


@pytest.mark.parametrize("which", ["stdout", "stderr", "both"])
def test_reader_that_leaves_ends_nothing(which: str, tmp_path: Path) -> None:
    words = [sys.executable, "-c", PRINTS, str(tmp_path / "log")]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, text=True, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdin and process.stdout and process.stderr
        assert process.stdout.readline() == "ready\n"
        for stream in ("stdout", "stderr"):
            if which in (stream, "both"):
                getattr(process, stream).close()
        process.stdin.write("go on\n")
        process.stdin.close()
        assert process.wait(limits.PROCESS) == 0
    logged = (tmp_path / "log").read_text()
    lost = {"stdout": ["step", "saved: here", "report"], "stderr": ["warning"]}
    for stream, texts in lost.items():
        assert all((text in logged) == (which in (stream, "both")) for text in texts), logged


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-", ">/dev/full"])
def test_output_closed_from_start_ends_nothing(closed: str, tmp_path: Path) -> None:
    words = ["sh", "-c", f'"$@" {closed}', "sh", sys.executable, "-c", PRINTS, str(tmp_path / "log")]
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=limits.PROCESS)
    assert done.returncode == 0 and "Traceback" not in done.stderr
    assert ("saved: here" in (tmp_path / "log").read_text()) == closed.startswith(">")


def opens_terminal() -> None:
    """Make stdin the terminal of the process, which gets SIGHUP when it is closed."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def test_a_command_goes_on_without_its_terminal(tmp_path: Path) -> None:
    """If the connection breaks, the command gets SIGHUP and can no longer print."""
    ours, theirs = pty.openpty()
    waits = "try: sys.stdin.readline()\n    except OSError: pass"
    process = subprocess.Popen(
        [sys.executable, "-c", PRINTS.replace("sys.stdin.readline()", waits), str(tmp_path / "log")],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=opens_terminal,
    )
    os.close(theirs)
    assert b"ready" in os.read(ours, 1 << 10)
    os.close(ours)
    assert process.wait(limits.PROCESS) == 0
    assert "saved: here" in (tmp_path / "log").read_text()


def heeds_signals() -> None:
    """Undo that a shell's background jobs ignore SIGINT."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)


@pytest.mark.parametrize(("phase", "status"), [("work", 130), ("cleanup", 130), ("exit", 0)])
@pytest.mark.parametrize("number", SIGNALS)
def test_signal_at_any_phase_leaves_the_status(number: int, phase: str, status: int) -> None:
    words = [sys.executable, "-c", SIGNALLED, str(int(number)), phase]
    done = subprocess.run(words, capture_output=True, text=True, timeout=limits.PROCESS, preexec_fn=heeds_signals)
    assert (done.returncode, "Traceback" in done.stderr) == (status, False), done.stderr


@pytest.mark.parametrize("number", SIGNALS)
def test_signal_amid_the_imports_ends_the_command(number: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "omegaconf.py").write_text(f"import os, time; os.kill(os.getpid(), {int(number)}); time.sleep(3600)")
    paths = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    words = [sys.executable, "-P", "-m", "roll.pipeline"]
    done = subprocess.run(
        words,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=limits.PROCESS,
        preexec_fn=heeds_signals,
    )
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


def test_handlers_are_restored() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    assert run_command(lambda: None) == 0
    assert [signal.getsignal(number) for number in SIGNALS] == before
