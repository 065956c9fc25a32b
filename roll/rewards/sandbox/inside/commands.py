"""The first process of a container that bubblewrap holds. It runs commands, and reads and writes files, one request
after another.

    request      answer
    run          how the command ended, and the beginnings of its output
    put          files are written
    get          the files of a folder
    end          all other processes are killed

A request is its length and a value of marshal. An answer is its kind, its length and raw bytes, because the other end
does not trust what comes out of a container. The other end closes when the process that started
the container ends; then this process ends too, and Linux ends all others of its process namespace.

Python and its files are mounted at a folder of their own while this process starts, and are gone before the first
command: commands see the image only. Each container pays for the imports of this module, so there are few.
"""

from __future__ import annotations

import marshal
import os
import resource
import select
import signal
import stat
import struct
import sys
import time
from collections.abc import Iterator, Mapping, Sequence

from roll.rewards.sandbox.inside.confine import (
    FORBIDDEN_TO_COMMANDS,
    TYPE_CHECKING,
    detach,
    drop_all_capabilities,
    end_with_parent,
    forbid_calls,
    hide_memory,
    leave_root,
    limit,
)

if TYPE_CHECKING:
    from typing import Any

REQUESTS = 0
"""Descriptor of the socket."""
LENGTH, HEADER = struct.Struct(">Q"), struct.Struct(">BQ")
"""Bytes of a request; kind and bytes of an answer."""
RAN, FILE = struct.Struct(">iBQQQ"), struct.Struct(">IiQ")
"""How a command ended: status, reason, bytes of both outputs, and bytes that it wrote. A file: bytes of its path, mode,
and bytes of its content.
"""
DONE, REFUSED, COMMAND, FILES = range(4)
"""Kinds of answers."""
BY_ITSELF, TIME, MEMORY = range(3)
"""Reasons of the end of a command."""
CHECK_SECONDS = 0.1
"""Seconds between two checks of the memory that all processes hold."""
IDLE_SECONDS = 0.5
"""The same, between two requests."""
GONE_SECONDS, PAUSE_SECONDS = 10.0, 0.002
"""Deadline for killed processes to end, and seconds between two checks."""
PAGE = os.sysconf("SC_PAGE_SIZE")
OPEN_FILES = 1024
LINK = -1
"""Mode of a symbolic link in a list of files; its content is the target."""
NOT_FOUND, NOT_STARTED = 127, 126
"""Exit statuses of commands that cannot be started, as shells give them."""


def main() -> None:
    """Serve requests until the other end is closed. The arguments are the folder of Python, the memory limit in bytes,
    the limit on processes, and 1 if this process is root.
    """
    mount, memory, processes, from_root = sys.argv[1], *map(int, sys.argv[2:])
    detach(mount)
    if from_root:
        leave_root(seen_as_root=True)
    else:
        drop_all_capabilities()
    end_with_parent()  # a change of user cancels it
    hide_memory()
    forbid_calls(FORBIDDEN_TO_COMMANDS)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    connection, nothing = os.dup(REQUESTS), os.open("/dev/null", os.O_RDWR)
    for descriptor in (0, 1):
        os.dup2(nothing, descriptor)
    send(connection, DONE)
    while True:
        watch_background(connection, memory)
        (size,) = LENGTH.unpack(exactly(connection, LENGTH.size))
        send(connection, *answer(marshal.loads(exactly(connection, size)), connection, memory, processes))


def watch_background(connection: int, memory: int) -> None:
    """Wait for a request. Meanwhile kill processes that a command left in the background if they hold too much."""
    while not select.select([connection], [], [], IDLE_SECONDS)[0]:
        _reap(0)
        if _resident() > memory:
            end_all()


def send(connection: int, kind: int, body: bytes = b"") -> None:
    """Send an answer. End this process if the other end is gone."""
    rest = memoryview(HEADER.pack(kind, len(body)) + body)
    try:
        while rest:
            rest = rest[os.write(connection, rest) :]
    except OSError:
        os._exit(0)


def exactly(connection: int, size: int) -> bytes:
    """Return the next bytes. End this process if the other end is gone."""
    received = bytearray()
    while len(received) < size:
        try:
            chunk = os.read(connection, min(size - len(received), 1 << 20))
        except OSError:
            chunk = b""
        if not chunk:
            os._exit(0)
        received += chunk
    return bytes(received)


def answer(asked: Mapping[str, Any], connection: int, memory: int, processes: int) -> tuple[int, bytes]:
    """Do what a request asks for. Errors of files are part of the answer, because commands can cause them."""
    try:
        match asked["ask"]:
            case "run":
                return COMMAND, run(asked, connection, memory, processes)
            case "put":
                put(asked["files"])
                return DONE, b""
            case "get":
                return FILES, get(asked["path"], asked["most"])
            case "end":
                end_all_and_wait()
                return DONE, b""
    except OSError as error:
        place = os.fsencode(error.filename) if error.filename else b""
        return REFUSED, (error.strerror or str(error)).encode() + b": " * bool(place) + place
    raise AssertionError(asked["ask"])


def run(asked: Mapping[str, Any], connection: int, memory: int, processes: int) -> bytes:
    """Run a command. Return how it ended, and the beginnings of its outputs.

    Processes that it leaves in the background continue, but are not waited for. A command past its deadline is killed
    with all its descendants; if all processes hold too much memory, all are killed. If the other end hangs up
    meanwhile, this process ends.
    """
    outputs = [os.pipe(), os.pipe()]
    pid = os.fork()
    if pid == 0:
        _become(asked, [writing for _, writing in outputs], memory, processes)
    for _, writing in outputs:
        os.close(writing)
    kept = {reading: bytearray() for reading, _ in outputs}
    totals = dict.fromkeys(kept, 0)
    deadline, why, status, ended = time.monotonic() + asked["seconds"], BY_ITSELF, None, os.pidfd_open(pid)
    waiting, killed = [*kept, ended, connection], set[int]()
    while status is None:
        for descriptor in select.select(waiting, [], [], CHECK_SECONDS)[0]:
            if descriptor == connection:
                os._exit(0)  # there are no requests during another one
            if descriptor != ended and not _read(descriptor, kept[descriptor], totals, asked["most"]):
                waiting.remove(descriptor)
        status = _reap(pid)
        if status is None and why == BY_ITSELF and time.monotonic() > deadline:
            why, killed = TIME, _kill_family(pid)
        elif status is None and why == BY_ITSELF and _resident() > memory:
            why, killed = MEMORY, set(_processes())
            end_all()
    os.close(ended)
    _wait_for(killed)
    for reading in kept:  # what is in the pipes; a process in the background may hold them open
        os.set_blocking(reading, False)
        while _read(reading, kept[reading], totals, asked["most"]) and time.monotonic() < deadline:
            pass
        os.close(reading)
    out, err = (bytes(part) for part in kept.values())
    return RAN.pack(status, why, len(out), len(err), sum(totals.values())) + out + err


def _become(asked: Mapping[str, Any], outputs: Sequence[int], memory: int, processes: int) -> None:
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
            (resource.RLIMIT_DATA, memory),
            (resource.RLIMIT_NPROC, processes),
            (resource.RLIMIT_NOFILE, OPEN_FILES),
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_MEMLOCK, 0),
            (resource.RLIMIT_MSGQUEUE, 0),
        ):
            limit(which, most)
        os.makedirs(asked["folder"], exist_ok=True)
        os.chdir(asked["folder"])
        program = _found(asked["command"][0], asked["variables"].get("PATH", ""))
        os.execve(program, asked["command"], asked["variables"])
    except FileNotFoundError as error:
        status, said = NOT_FOUND, f"{error.strerror}: {error.filename}\n"
    except (OSError, ValueError) as error:
        said = f"{asked['command'][0]}: {error}\n"
    finally:
        try:
            os.write(2, os.fsencode(said))
        finally:
            os._exit(status)


def _found(name: str, path: str) -> str:
    """Return the program of a name. `os.execvpe` would import modules that are gone by then."""
    for folder in path.split(":") if "/" not in name else ():
        if os.access(f"{folder}/{name}", os.X_OK) and not os.path.isdir(f"{folder}/{name}"):
            return f"{folder}/{name}"
    return name


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


def _fields(pid: int, name: str) -> list[bytes]:
    """Return the fields of a file of a process, those behind its name; none if it has ended."""
    try:
        with open(f"/proc/{pid}/{name}", "rb", buffering=0) as file:
            return file.read(1 << 12).rpartition(b")")[2].split()
    except OSError:
        return []


def _resident() -> int:
    """Return the memory that all processes hold, in bytes. Pages shared after a fork count for each of them."""
    held = [_fields(pid, "statm") for pid in _processes()]
    return sum(int(fields[1]) - int(fields[2]) for fields in held if fields) * PAGE


def _kill_family(pid: int) -> set[int]:
    """Kill a process, its descendants and all processes of its session. Return them."""
    stats = {one: fields for one in _processes() if (fields := _fields(one, "stat"))}
    family, size = {pid} | {one for one, fields in stats.items() if int(fields[3]) == pid}, 0
    while size < len(family):
        size = len(family)
        family |= {one for one, fields in stats.items() if int(fields[1]) in family}
    for one in family:
        _kill(one)
    return family


def _wait_for(killed: set[int]) -> None:
    """Wait until killed processes are gone, so that the next request finds none of them at work."""
    deadline = time.monotonic() + GONE_SECONDS
    while any(os.path.exists(f"/proc/{pid}") for pid in killed) and time.monotonic() < deadline:
        _reap(0)
        time.sleep(PAUSE_SECONDS)


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def end_all() -> None:
    """Kill all other processes of the namespace."""
    _kill(-1)


def end_all_and_wait() -> None:
    """Kill all other processes of the namespace, until the last one is gone."""
    deadline = time.monotonic() + GONE_SECONDS
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


def put(files: Sequence[tuple[str, int, bytes]]) -> None:
    """Write files, each (path, mode, content). They replace what is there.

    Raises:
        OSError: a file cannot be written.
    """
    for path, mode, content in files:
        os.makedirs(os.path.dirname(path) or "/", exist_ok=True)
        if os.path.isdir(path) and not os.path.islink(path):
            _remove_folder(path)
        elif os.path.lexists(path):
            os.unlink(path)
        if mode == LINK:
            os.symlink(content, os.fsencode(path))
            continue
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
        with open(descriptor, "wb") as file:
            os.fchmod(descriptor, mode)
            file.write(content)


def get(path: str, most: int) -> bytes:
    """Return a file or the files of a folder. Devices, pipes and sockets are left out.

    Raises:
        OSError: there is no such file, it cannot be read, or the files have more than `most` bytes.
    """
    body, size = bytearray(), 0
    for place in _walked(path):
        found = os.lstat(place)
        if stat.S_ISLNK(found.st_mode):
            mode, content = LINK, os.fsencode(os.readlink(place))
        elif stat.S_ISREG(found.st_mode):
            mode = stat.S_IMODE(found.st_mode)
            with open(os.open(place, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
                content = file.read(most - size + 1)
        else:
            continue
        named = os.fsencode(place)
        body += FILE.pack(len(named), mode, len(content)) + named + content
        size += len(named) + len(content)
        if size > most:
            raise OSError(27, f"more than {most} bytes", path)
    return bytes(body)


def _walked(path: str) -> Iterator[str]:
    if not os.path.isdir(path) or os.path.islink(path):
        yield path
        return
    for folder, names, others in os.walk(path):
        yield from (os.path.join(folder, name) for name in others)
        yield from (inner for name in names if os.path.islink(inner := os.path.join(folder, name)))
