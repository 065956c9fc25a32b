"""Runs a program on its test cases, in a sandbox of its own."""

from __future__ import annotations

import fcntl
import marshal
import os
import select
import selectors
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from typing import Any

from roll.rewards.sandbox.bubblewrap import PROBE_SECONDS, REMEDY, Interpreter, SandboxUnavailable, start_sandbox
from roll.rewards.sandbox.inside.supervisor import FRAME, OUTCOME, SEALS
from roll.system.sizes import MIB
from roll.system.tree import end_beneath

GRACE_SECONDS = 30.0
"""Seconds for the sandbox to start and to report, in addition to the program's wall-clock limit."""
KILL_SECONDS = 30.0
"""Seconds to wait for a killed process. It ends at once unless the kernel is blocked."""
END_SECONDS = 5.0
"""Seconds in which a sandbox must end by itself. If it does not, it is killed."""
COMPLAINT_BYTES = 2000
OPEN_FILES, THREADS, STACK_BYTES = 64, 64, 64 << 20


class CaseEnd(IntEnum):
    """How a case ended. The numbers are those that the supervisor sends."""

    OK = 0
    FAILED = 1
    COMPILE_ERROR = 2
    CPU_TIME = 3
    WALL_TIME = 4
    OUTPUT_SIZE = 5


@dataclass(frozen=True)
class ProgramLimits:
    """Limits of one program."""

    cpu_seconds: int = 4
    """CPU seconds of each case, which do not depend on the load of the machine."""
    wall_seconds: float = 60.0
    """Wall-clock seconds of all cases together, for programs that sleep or wait."""
    memory_mib: int = 1024
    """Address space of the program, including all its threads, in MiB. A program cannot start processes."""
    disk_mib: int = 64
    """Size of /tmp, the only writable folder, in MiB."""
    output_mib: int = 4
    """Largest output of a case, in MiB. A case that writes more is ended."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of one case."""

    ending: CaseEnd
    cpu_seconds: float
    output: bytes
    """Standard output of a script; empty for tests."""
    note: str
    """Reason of a failure: the last line of stderr, or the message of the test."""


@dataclass(frozen=True)
class Job:
    """A program and its test cases."""

    source: str
    kind: str
    """`input`, `assert`, `check` or `text`."""
    inputs: tuple[bytes, ...] = ()
    """Standard input of a script in each case."""
    tests: tuple[dict[str, Any], ...] = ()
    """For the other kinds: the tests, as `judge.judge` expects them."""


def run_program(job: Job, limits: ProgramLimits, interpreter: Interpreter, sandboxed: bool = True) -> Iterator[Outcome]:
    """Yield the outcome of each case as soon as it is known.

    Cases after the wall-clock limit are not run, and their ending is WALL_TIME. A caller that stops early must close
    the iterator, which ends the sandbox.

    Args:
        sandboxed: if False, the program runs without isolation, with the files and the network of this machine.

    Raises:
        SandboxUnavailable: the sandbox did not start, or ended unexpectedly before it reported all cases.
    """
    cases = len(job.inputs) or len(job.tests)
    described = {"source": job.source, "kind": job.kind, "cases": cases, "limits": _for_supervisor(limits)}
    given, tests = _file([described], job.inputs), _file(job.tests, ())
    reading, writing = (end.detach() for end in socket.socketpair())
    try:
        sandbox = start_sandbox(interpreter, limits.disk_mib * MIB if sandboxed else None, (given, writing, tests))
    except BaseException:
        os.close(reading)
        raise
    finally:
        for descriptor in (given, tests, writing):
            os.close(descriptor)
    reported, late = 0, False
    try:
        deadline = time.monotonic() + limits.wall_seconds + GRACE_SECONDS
        for outcome in _outcomes(reading, cases, (limits.output_mib * MIB) + MIB, deadline):
            yield outcome
            reported += 1
            late = outcome.ending == CaseEnd.WALL_TIME
        if not late and reported < cases:
            raise SandboxUnavailable(f"the sandbox ended before it reported all cases: {_complaint(sandbox)}")
    finally:
        os.close(reading)
        _end(sandbox)
    for _ in range(reported, cases):
        yield Outcome(CaseEnd.WALL_TIME, 0.0, b"", "not run: the program reached its wall-clock limit")


def _for_supervisor(limits: ProgramLimits) -> dict[str, Any]:
    return {
        "cpu_seconds": limits.cpu_seconds,
        "wall_seconds": limits.wall_seconds,
        "memory_bytes": limits.memory_mib * MIB,
        "file_bytes": limits.disk_mib * MIB,
        "output_bytes": limits.output_mib * MIB,
        "open_files": OPEN_FILES,
        "threads": THREADS,
        "stack_bytes": STACK_BYTES,
    }


@cache
def ready(interpreter: Interpreter, sandboxed: bool) -> None:
    """Check that the sandbox can run a small program. Only the first call for an interpreter runs it.

    Raises:
        SandboxUnavailable: the program does not run. The message has the reason and a remedy.
    """
    try:
        outcomes = list(
            run_program(
                Job("print(6 * 7)", "input", (b"",)), ProgramLimits(wall_seconds=PROBE_SECONDS), interpreter, sandboxed
            )
        )
    except OSError as error:
        raise SandboxUnavailable(f"{error}; {REMEDY}") from error
    if outcomes[0].output.strip() != b"42":
        raise SandboxUnavailable(
            f"a program that prints 42 printed {outcomes[0].output[:80]!r}: {outcomes[0].note}; {REMEDY}"
        )


def _file(described: Sequence[dict[str, Any]], raw: Sequence[bytes]) -> int:
    """Return the descriptor of a sealed in-memory file with one frame for each part."""
    descriptor = os.memfd_create("frames", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    with os.fdopen(os.dup(descriptor), "wb") as file:
        for frame in (*(marshal.dumps(part, 2) for part in described), *raw):
            file.write(FRAME.pack(len(frame)) + frame)
    os.lseek(descriptor, 0, os.SEEK_SET)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
    return descriptor


def _outcomes(reading: int, cases: int, most: int, deadline: float) -> Iterator[Outcome]:
    """Yield the sandbox's outcomes until all cases are reported, the deadline passes or the sandbox ends."""
    received = bytearray()
    with selectors.DefaultSelector() as selector:
        selector.register(reading, selectors.EVENT_READ)
        while cases:
            if len(received) >= OUTCOME.size:
                ending, cpu, output, note = OUTCOME.unpack_from(received)
                size = OUTCOME.size + output + note
                if output > most or note > most:
                    return
                if len(received) >= size:
                    text = bytes(received[OUTCOME.size : size])
                    del received[:size]
                    cases -= 1
                    yield Outcome(CaseEnd(ending), cpu, text[:output], text[output:].decode("utf-8", "replace"))
                    continue
            if not selector.select(max(deadline - time.monotonic(), 0)):
                return
            chunk = os.read(reading, 1 << 16)
            if not chunk:
                return
            received += chunk


def _complaint(sandbox: subprocess.Popen[bytes]) -> str:
    said = _end(sandbox).decode("utf-8", "replace").strip()
    return f"{said.rpartition(chr(10))[2] or f'status {sandbox.returncode}'}; {REMEDY}"


def _end(sandbox: subprocess.Popen[bytes]) -> bytes:
    """End a sandbox with all its processes. Return the end of their stderr.

    The supervisor reaps its processes and ends when the reader of its outcomes is gone. If it does not, it is killed.
    If all were killed at once, zombies could be left, as children of the reward process.
    """
    if sandbox.stderr is None or sandbox.stderr.closed:
        return b""
    said, deadline = b"", time.monotonic() + END_SECONDS
    with sandbox.stderr as pipe:
        while select.select([pipe], [], [], max(deadline - time.monotonic(), 0))[0] and (
            chunk := os.read(pipe.fileno(), 1 << 16)
        ):
            said = (said + chunk)[-COMPLAINT_BYTES:]
    try:
        sandbox.wait(max(deadline - time.monotonic(), 0))
    except subprocess.TimeoutExpired:
        end_beneath(sandbox.pid)
        with suppress(subprocess.TimeoutExpired):
            sandbox.wait(END_SECONDS)
        sandbox.kill()
        sandbox.wait(KILL_SECONDS)
    return said
