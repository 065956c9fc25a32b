"""The first process of a container that bubblewrap holds. It runs commands, and reads and writes files, one request
after another.

    request      answer
    run          how the command ended, and the beginnings of its output
    put          files are written
    get          the files of a folder
    end          all other processes are killed

A message is two lengths, a header in JSON and a body of raw bytes. The other end closes when the process that started
the container ends; then this process ends too, and Linux ends all others of its process namespace.

Python and its files are mounted at a folder of their own while this process starts, and are gone before the first
command: commands see the image only.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import selectors
import signal
import socket
import stat
import struct
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from roll.rewards.sandbox.inside.confine import (
    FORBIDDEN_TO_COMMANDS,
    detach,
    drop_all_capabilities,
    end_with_parent,
    forbid_calls,
    hide_memory,
    leave_root,
    limit,
)

REQUESTS = 0
"""Descriptor of the socket."""
LENGTHS = struct.Struct(">QQ")
"""Bytes of the header and of the body."""
LOOK_SECONDS = 0.1
"""Seconds between two checks of the memory that all processes hold."""
IDLE_SECONDS = 0.5
"""The same, between two requests."""
END_SECONDS, PAUSE_SECONDS = 10.0, 0.002
"""Deadline for killed processes to end, and seconds between two checks."""
PAGE = os.sysconf("SC_PAGE_SIZE")
OPEN_FILES = 1024
LINK = -1
"""Mode of a symbolic link in a list of files; its content is the target."""
NOT_FOUND, NOT_STARTED = 127, 126
"""Exit statuses of commands that cannot be started, as shells give them."""


def main() -> None:
    """Serve requests until the other end is closed. The argument is the settings in JSON."""
    settings = json.loads(sys.argv[1])
    detach(settings["mount"])
    if settings["from_root"]:
        leave_root(seen_as_root=True)
    else:
        drop_all_capabilities()
    end_with_parent()  # a change of user cancels it
    hide_memory()
    forbid_calls(FORBIDDEN_TO_COMMANDS)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    with socket.socket(fileno=os.dup(REQUESTS)) as connection:
        nothing = os.open("/dev/null", os.O_RDWR)
        for descriptor in (0, 1):
            os.dup2(nothing, descriptor)
        send(connection, {"ready": True})
        while True:
            watch_background(connection, settings["bounds"])
            if (request := receive(connection)) is None:
                break
            header, body = request
            send(connection, *answer(header, body, settings["bounds"], connection))
    os._exit(0)


def watch_background(connection: socket.socket, bounds: Mapping[str, Any]) -> None:
    """Wait for a request. Meanwhile kill processes that a command left in the background if they hold too much."""
    while not select.select([connection], [], [], IDLE_SECONDS)[0]:
        _reap(0)
        if _resident() > bounds["memory_bytes"]:
            end_all()


def send(connection: socket.socket, header: Mapping[str, Any], body: bytes = b"") -> None:
    """Send a message. Raises OSError if the other end is gone."""
    text = json.dumps(header).encode()
    connection.sendall(LENGTHS.pack(len(text), len(body)) + text)
    connection.sendall(body)


def receive(connection: socket.socket) -> tuple[dict[str, Any], bytes] | None:
    """Return the header and the body of the next message; None if the other end is gone."""
    lengths = _exactly(connection, LENGTHS.size)
    if lengths is None:
        return None
    of_header, of_body = LENGTHS.unpack(lengths)
    header, body = _exactly(connection, of_header), _exactly(connection, of_body)
    return None if header is None or body is None else (json.loads(header), body)


def _exactly(connection: socket.socket, size: int) -> bytes | None:
    received = bytearray()
    while len(received) < size:
        try:
            chunk = connection.recv(min(size - len(received), 1 << 20))
        except OSError:
            return None
        if not chunk:
            return None
        received += chunk
    return bytes(received)


def answer(
    header: Mapping[str, Any], body: bytes, bounds: Mapping[str, Any], connection: socket.socket
) -> tuple[dict[str, Any], bytes]:
    """Do what a request asks for. Errors of files are part of the answer, because commands can cause them."""
    try:
        match header["ask"]:
            case "run":
                return run(header, bounds, connection)
            case "put":
                put(header["files"], body)
                return {}, b""
            case "get":
                return get(header["path"], header["most"])
            case "end":
                end_all_and_wait()
                return {}, b""
    except OSError as error:
        return {"error": f"{error.strerror or error}: {error.filename or ''}".rstrip(": ")}, b""
    raise AssertionError(header["ask"])


def run(
    header: Mapping[str, Any], bounds: Mapping[str, Any], connection: socket.socket
) -> tuple[dict[str, Any], bytes]:
    """Run a command. Return its exit status (negative: the signal), why it was killed, and the beginnings of its
    output.

    Processes that it leaves in the background continue, but are not waited for. A command past its deadline is killed
    with all its descendants; if all processes hold too much memory, all are killed. If the other end hangs up meanwhile,
    this process ends.
    """
    outputs = [os.pipe(), os.pipe()]
    pid = os.fork()
    if pid == 0:
        _become(header, [writing for _, writing in outputs], bounds)
    for _, writing in outputs:
        os.close(writing)
    kept = {reading: bytearray() for reading, _ in outputs}
    totals = dict.fromkeys(kept, 0)
    deadline, why, status = time.monotonic() + header["seconds"], "", None
    with selectors.DefaultSelector() as selector, _exit_of(pid) as ended:
        for descriptor in (*kept, ended, connection.fileno()):
            selector.register(descriptor, selectors.EVENT_READ)
        while status is None:
            for key, _ in selector.select(LOOK_SECONDS):
                if key.fd == connection.fileno():
                    os._exit(0)  # there are no requests during another one
                if key.fd != ended and not _read(key.fd, kept[key.fd], totals, header["most"]):
                    selector.unregister(key.fd)
            status = _reap(pid)
            if status is None and not why and time.monotonic() > deadline:
                why = "time"
                _kill_family(pid)
            elif status is None and not why and _resident() > bounds["memory_bytes"]:
                why = "memory"
                end_all()
    for reading in kept:  # what is in the pipes; a process in the background may hold them open
        os.set_blocking(reading, False)
        while _read(reading, kept[reading], totals, header["most"]) and time.monotonic() < deadline:
            pass
        os.close(reading)
    out, err = (bytes(part) for part in kept.values())
    counts = dict(zip(("out", "err"), (len(out), len(err)), strict=True))
    return {"status": status, "why": why, **counts, "totals": list(totals.values())}, out + err


def _become(header: Mapping[str, Any], outputs: Sequence[int], bounds: Mapping[str, Any]) -> None:
    """Turn this process into the command. Does not return."""
    status, said = NOT_STARTED, ""
    try:
        os.setsid()
        for descriptor, target in zip(outputs, (1, 2), strict=True):
            os.dup2(descriptor, target)
        os.closerange(3, OPEN_FILES)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # which Python ignores
            signal.signal(number, signal.SIG_DFL)
        for which, most in (
            (resource.RLIMIT_DATA, bounds["memory_bytes"]),
            (resource.RLIMIT_NPROC, bounds["processes"]),
            (resource.RLIMIT_NOFILE, OPEN_FILES),
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_MEMLOCK, 0),
            (resource.RLIMIT_MSGQUEUE, 0),
        ):
            limit(which, most)
        os.makedirs(header["folder"], exist_ok=True)
        os.chdir(header["folder"])
        os.execvpe(header["command"][0], header["command"], header["variables"])
    except FileNotFoundError as error:
        status, said = NOT_FOUND, f"{error.strerror}: {error.filename or header['command'][0]}\n"
    except (OSError, ValueError) as error:
        said = f"{header['command'][0]}: {error}\n"
    with contextlib.suppress(OSError):
        os.write(2, said.encode("utf-8", "replace"))
    os._exit(status)


@contextlib.contextmanager
def _exit_of(pid: int) -> Iterator[int]:
    """A context with a descriptor that is readable once a child has ended."""
    descriptor = os.pidfd_open(pid)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _read(descriptor: int, kept: bytearray, totals: dict[int, int], most: int) -> bool:
    """Read what a pipe has, and keep it up to `most` bytes. Return whether there may be more."""
    try:
        chunk = os.read(descriptor, 1 << 16)
    except BlockingIOError:
        return False
    totals[descriptor] += len(chunk)
    kept += chunk[: max(most - len(kept), 0)]
    return bool(chunk)


def _reap(pid: int) -> int | None:
    """Reap all processes that have ended. Return the exit status of `pid`, negative for a signal; None if it runs."""
    status = None
    while True:
        try:
            ended, code = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return status
        if not ended:
            return status
        if ended == pid:
            status = os.waitstatus_to_exitcode(code)


def _processes() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdecimal() and name != "1")


def _resident() -> int:
    """Return the memory that all processes hold, in bytes. Pages shared after a fork count for each of them."""
    total = 0
    for pid in _processes():
        with contextlib.suppress(OSError, ValueError), open(f"/proc/{pid}/statm", "rb") as file:
            resident, shared = map(int, file.read().split()[1:3])
            total += (resident - shared) * PAGE
    return total


def _kill_family(pid: int) -> None:
    """Kill a process, its descendants and all processes of its session."""
    parents: dict[int, int] = {}
    sessions: dict[int, int] = {}
    for one in _processes():
        with contextlib.suppress(OSError, ValueError), open(f"/proc/{one}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
            parents[one], sessions[one] = int(fields[1]), int(fields[3])
    family, size = {pid} | {one for one, session in sessions.items() if session == pid}, 0
    while size < len(family):
        size = len(family)
        family |= {one for one, parent in parents.items() if parent in family}
    for one in family:
        with contextlib.suppress(ProcessLookupError):
            os.kill(one, signal.SIGKILL)


def end_all() -> None:
    """Kill all other processes of the namespace."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)


def end_all_and_wait() -> None:
    """Kill all other processes of the namespace, until the last one is gone."""
    deadline = time.monotonic() + END_SECONDS
    while any(_processes()):
        end_all()
        _reap(0)
        if time.monotonic() > deadline:
            raise OSError(110, "a killed process does not end")
        time.sleep(PAUSE_SECONDS)


def _remove_folder(path: str) -> None:
    for folder, names, files in os.walk(path, topdown=False):
        for name in files:
            os.unlink(os.path.join(folder, name))
        for name in names:
            inner = os.path.join(folder, name)
            (os.unlink if os.path.islink(inner) else os.rmdir)(inner)
    os.rmdir(path)


def put(files: Sequence[Sequence[Any]], body: bytes) -> None:
    """Write files, each (path, mode, bytes), whose contents follow one another in `body`. They replace what is there.

    Raises:
        OSError: a file cannot be written.
    """
    begin = 0
    for path, mode, size in files:
        content = body[begin : begin + size]
        begin += size
        os.makedirs(os.path.dirname(path) or "/", exist_ok=True)
        if os.path.isdir(path) and not os.path.islink(path):
            _remove_folder(path)
        elif os.path.lexists(path):
            os.unlink(path)
        if mode == LINK:
            os.symlink(content, path.encode())
            continue
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
        with open(descriptor, "wb") as file:
            os.fchmod(descriptor, mode)
            file.write(content)


def get(path: str, most: int) -> tuple[dict[str, Any], bytes]:
    """Return a file or the files of a folder. Devices, pipes and sockets are left out.

    Raises:
        OSError: there is no such file, it cannot be read, or the files have more than `most` bytes.
    """
    files, body = [], bytearray()
    for place in _walked(path):
        found = os.lstat(place)
        if stat.S_ISLNK(found.st_mode):
            mode, content = LINK, os.fsencode(os.readlink(place))
        elif stat.S_ISREG(found.st_mode):
            mode = stat.S_IMODE(found.st_mode)
            with open(os.open(place, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
                content = file.read(most - len(body) + 1)
        else:
            continue
        body += content
        if len(body) > most:
            raise OSError(27, f"more than {most} bytes", path)
        files.append((place, mode, len(content)))
    return {"files": files}, bytes(body)


def _walked(path: str) -> Iterator[str]:
    if not os.path.isdir(path) or os.path.islink(path):
        yield path
        return
    for folder, names, others in os.walk(path):
        yield from (os.path.join(folder, name) for name in others)
        yield from (inner for name in names if os.path.islink(inner := os.path.join(folder, name)))
