"""The first process of the sandbox. It starts, measures and ends the other processes. It never reads the expected
values of a test.

    descriptor   use
    0            sealed file: the job, and then the input of each case of a script
    1            socket: an outcome for each case; its other end closes when the process that created the sandbox ends
    3            sealed file: the tests, which only the processes of tests read

The supervisor is process 1 of its process namespace, so processes in the namespace cannot kill it, and Linux kills them
when it ends.
"""

from __future__ import annotations

import fcntl
import marshal
import os
import resource
import selectors
import signal
import site
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from roll.rewards.sandbox.inside.candidate import FILE, NOT_COMPILED, run_candidate, serve_program
from roll.rewards.sandbox.inside.confine import bound_inodes, confine, end_with_parent, hide_memory, leave_root
from roll.rewards.sandbox.inside.judge import PASSED, run_test, write_verdict
from roll.rewards.sandbox.inside.wire import Channel

JOB, OUTCOMES, TESTS = 0, 1, 3
FRAME = struct.Struct("<Q")
OUTCOME = struct.Struct("<BdII")
"""Header of a case's outcome: ending, CPU seconds, bytes of output and note, which follow it."""
OK, FAILED, COMPILE_ERROR, CPU_TIME, WALL_TIME, OUTPUT_SIZE = range(6)
NOTE_BYTES = 400
CERTAINLY = 0.5
"""Share of the CPU limit from which it is the cause of a process's death; the kernel's count may lag."""
SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


@dataclass
class Watched:
    """A child process and its output."""

    pid: int
    pidfd: int
    outputs: dict[int, bytearray]
    """Bytes received from each pipe, by the descriptor of its reading end."""
    status: int | None = None
    """Exit status, negative for a signal. None while the process runs."""
    cpu: float = 0.0
    """CPU seconds, known after the process has ended."""
    ended: str = ""
    """Why the supervisor killed it: `wall` (time) or `output` (size). Empty if it did not."""
    open_ends: set[int] = field(default_factory=set)
    """Descriptors of pipes that are not at their end yet."""


def main() -> None:
    """Run all cases, one after another."""
    os.dup2(int(sys.argv[1]), TESTS)
    sys.argv = [FILE]
    site.setquit()  # `exit` and others, which Python defines for every script; the interpreter runs without `site`
    site.setcopyright()
    site.sethelper()
    os.closerange(TESTS + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    if os.getpid() == 1:
        bound_inodes()
    if os.geteuid() == 0 and os.getpid() == 1:
        leave_root()  # not without a sandbox: there, only root may be able to read the interpreter's files
    hide_memory()
    job = marshal.loads(read_frame(JOB))
    limits = job["limits"]
    deadline = time.monotonic() + limits["wall_seconds"]
    for _ in range(job["cases"]):
        if job["kind"] == "input":
            outcome = _run_script(job["source"], read_frame(JOB), limits, deadline)
        else:
            outcome = _run_test(job["source"], job["kind"] != "text", limits, deadline)
        _write(outcome)
        if outcome[0] == WALL_TIME and time.monotonic() >= deadline:
            return


def read_frame(descriptor: int) -> bytes:
    """Read the next frame. Processes that share the descriptor share its position: the next read continues."""
    (size,) = FRAME.unpack(os.read(descriptor, FRAME.size))
    frame = bytearray()
    while len(frame) < size:
        frame += os.read(descriptor, size - len(frame))
    return bytes(frame)


def _run_script(
    source: str, stdin: bytes, limits: Mapping[str, Any], deadline: float
) -> tuple[int, float, bytes, bytes]:
    given = _sealed(stdin)
    out, out_end = os.pipe()
    err, err_end = os.pipe()

    def child() -> None:
        for target, descriptor in enumerate((given, out_end, err_end)):
            os.dup2(descriptor, target)
        os.closerange(3, limits["open_files"] + 64)
        _renew_streams()
        confine(limits)
        run_candidate(source)

    process = _start(child, {out: bytearray(), err: bytearray()})
    for descriptor in (given, out_end, err_end):
        os.close(descriptor)
    _watch([process], process, limits["output_bytes"], deadline)
    return _verdict(process, limits), process.cpu, bytes(process.outputs[out]), _last_line(process.outputs[err])


def _run_test(
    source: str, has_candidate: bool, limits: Mapping[str, Any], deadline: float
) -> tuple[int, float, bytes, bytes]:
    ours, theirs = socket.socketpair()
    said, said_end = os.pipe()
    err, err_end = os.pipe()
    null = os.open("/dev/null", os.O_RDWR)

    def test() -> None:
        text = marshal.loads(read_frame(TESTS))
        theirs.close()
        hide_memory()
        for target, descriptor in enumerate((null, null, null, said_end, ours.fileno())):
            os.dup2(descriptor, target + 100)  # moved out of the way first, because a source may also be a target
        for target in range(5):
            os.dup2(target + 100, target)
        os.closerange(5, limits["open_files"] + 64)
        _renew_streams()
        ours.detach()
        channel = Channel(socket.socket(fileno=4))
        confine(limits)
        verdict, note = run_test(text, channel)
        write_verdict(3, verdict, note)
        os._exit(0)

    def candidate() -> None:
        for target, descriptor in enumerate((null, null, err_end, theirs.fileno())):
            os.dup2(descriptor, target + 100)
        for target in range(4):
            os.dup2(target + 100, target)
        os.closerange(4, limits["open_files"] + 64)
        _renew_streams()
        theirs.detach()
        ours.detach()
        confine(limits)
        serve_program(source, socket.socket(fileno=3))

    processes = [_start(test, {said: bytearray()})]
    if has_candidate:
        processes.append(_start(candidate, {err: bytearray()}))
    for end in (ours, theirs):
        end.close()
    for descriptor in (said_end, err_end, null):
        os.close(descriptor)
    if not has_candidate:
        os.close(err)
    _watch(processes, processes[0], limits["output_bytes"], deadline)
    verdict, _, note = bytes(processes[0].outputs[said]).partition(b"\n")
    spent = sum(process.cpu for process in processes)
    if verdict == PASSED and processes[0].ended == "":
        return OK, spent, b"", b""
    for process in reversed(processes):
        if (why := _verdict(process, limits)) not in (OK, FAILED):
            return why, spent, b"", note[:NOTE_BYTES]
    told = _last_line(processes[-1].outputs[err]) if has_candidate else b""
    return FAILED, spent, b"", (told or note)[:NOTE_BYTES]


def _sealed(content: bytes) -> int:
    """Return the descriptor of a sealed in-memory file."""
    descriptor = os.memfd_create("input", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]
    os.lseek(descriptor, 0, os.SEEK_SET)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
    return descriptor


def _renew_streams() -> None:
    """Rebuild Python's standard streams on descriptors 0 to 2."""
    sys.stdin = os.fdopen(0, encoding="utf-8", errors="surrogateescape", closefd=False)
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", errors="surrogateescape", closefd=False)
    sys.stderr = os.fdopen(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False, buffering=1)
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc]


def _start(work: Callable[[], NoReturn | None], outputs: dict[int, bytearray]) -> Watched:
    pid = os.fork()
    if pid == 0:
        try:
            end_with_parent()
            work()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    for descriptor in outputs:
        os.set_blocking(descriptor, False)
    return Watched(pid, os.pidfd_open(pid), outputs, open_ends=set(outputs))


def _watch(processes: list[Watched], first: Watched, most: int, deadline: float) -> None:
    """Wait until `first` ends, then kill the others. Reap all processes and close their descriptors.

    At the deadline all are killed. A process whose output exceeds `most` bytes is killed too.
    """
    with selectors.DefaultSelector() as selector:
        for process in processes:
            selector.register(process.pidfd, selectors.EVENT_READ, (process, None))
            for descriptor in process.outputs:
                selector.register(descriptor, selectors.EVENT_READ, (process, descriptor))
        selector.register(OUTCOMES, selectors.EVENT_READ, (None, None))
        while first.status is None:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                first.ended = first.ended or "wall"
                _end(processes)
            for key, _ in selector.select(max(remaining, 0)):
                process, descriptor = key.data
                if process is None:
                    # The reader is gone. A dying bubblewrap may not have permission to kill this user's process.
                    _end_and_reap(processes)
                    os._exit(1)
                if descriptor is None:
                    selector.unregister(process.pidfd)
                    _reap(process)
                elif not _drain(process, descriptor, most):
                    selector.unregister(descriptor)
                if process.ended == "output":
                    _end([process])
        _end_and_reap(processes)
    for process in processes:
        for descriptor in tuple(process.open_ends):
            _drain(process, descriptor, most)
        for descriptor in (*process.outputs, process.pidfd):
            os.close(descriptor)


def _end(processes: list[Watched]) -> None:
    for process in processes:
        if process.status is None:
            os.kill(process.pid, signal.SIGKILL)


def _end_and_reap(processes: list[Watched]) -> None:
    _end(processes)
    for process in processes:
        if process.status is None:
            _reap(process)


def _reap(process: Watched) -> None:
    _, status, usage = os.wait4(process.pid, 0)
    process.status, process.cpu = os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime


def _drain(process: Watched, descriptor: int, most: int) -> bool:
    """Read the available bytes. Return False at the end of the stream."""
    while True:
        try:
            chunk = os.read(descriptor, 1 << 16)
        except BlockingIOError:
            return True
        if not chunk:
            process.open_ends.discard(descriptor)
            return False
        room = most - len(process.outputs[descriptor])
        process.outputs[descriptor] += chunk[:room]
        if len(chunk) > room:
            process.ended = "output"
            return True


def _verdict(process: Watched, limits: Mapping[str, Any]) -> int:
    if process.ended:
        return WALL_TIME if process.ended == "wall" else OUTPUT_SIZE
    if process.status == 0:
        return OK
    if process.status == NOT_COMPILED:
        return COMPILE_ERROR
    killed = process.status in (-signal.SIGXCPU, -signal.SIGKILL)
    return CPU_TIME if killed and process.cpu >= limits["cpu_seconds"] * CERTAINLY else FAILED


def _last_line(output: bytearray) -> bytes:
    lines = [line for line in bytes(output[-4000:]).strip().split(b"\n") if not line.startswith(b" ")]
    return lines[-1][:NOTE_BYTES] if lines else b""


def _write(outcome: tuple[int, float, bytes, bytes]) -> None:
    status, cpu, output, note = outcome
    view = memoryview(OUTCOME.pack(status, cpu, len(output), len(note)) + output + note)
    while view:
        view = view[os.write(OUTCOMES, view) :]


if __name__ == "__main__":
    main()
