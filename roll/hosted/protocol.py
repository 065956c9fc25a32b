"""What a process and its child that runs user code say to each other, and the main loop of the child. `process.py` is
the parent's side.

    process.py                              child
      ── Assignment ──────────────────────▶  imports the user code
      ◀─────────────────────────── Ready ──
      ── [request] ───────────────────────▶  one or more calls in each request
      ◀── Reply ── ..                        one for each call, as soon as the call ends

If the user code is asynchronous, calls run concurrently, and the child itself ends calls that exceed the deadline.
Otherwise it makes one call at a time, in the order in which they arrive.

The socket is separate from stdout and stderr, so it never carries output that user code prints. Each message is
preceded by its length. The parent sends pickles. The child sends JSON, so that user code that writes to the socket
cannot run code in the parent. Each call has a seal, which is a random number that cannot be guessed. An answer is
accepted only once, and only with the seal of a call in flight.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import resource
import secrets
import signal
import socket
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar, get_args

from roll.errors import ConfigError, Fault, FaultCode
from roll.system.orphans import adopt_orphans, die_with
from roll.system.text import cleaned

HEADER = struct.Struct(">Q")
SEAL = struct.Struct(">Q")
MOST_BYTES = 64 << 20
"""Largest size of a message from the child in bytes."""
SHOWN_BYTES = 40
"""Number of bytes of an unreadable message that an error shows."""
C = TypeVar("C")
T = TypeVar("T")
_scanned: Callable[[str, int], tuple[Any, int]] = json.JSONDecoder().scan_once  # pyright: ignore[reportAttributeAccessIssue]


class Garbled(Exception):
    """The child sent an invalid message. `str()` returns the reason."""


@dataclass(frozen=True)
class Assignment:
    """The first message to a child: what it serves, and its limits."""

    domain: str
    timeout: float
    """Deadline of each call in seconds. The parent enforces it for all calls, and the child too for concurrent ones."""
    memory_bytes: int
    """Largest number of bytes that the process may allocate."""


A = TypeVar("A", bound=Assignment)


@dataclass(frozen=True)
class Ready(Generic[T]):
    """A child's first message, before any call."""

    faults: tuple[Fault, ...]
    """Faults of the configuration. If there are any, the process ends."""
    side_by_side: bool
    """Whether calls run concurrently, and the child ends those past the deadline unless its event loop is blocked."""
    traits: T
    """Traits of the user code that the parent needs; None if there are faults."""


class Reply(NamedTuple):
    """The outcome of a call."""

    number: int
    """Number of the call."""
    seal: int
    returned: Any
    """The value that the user code returned, still encoded."""
    remark: Any
    """What else the child reports of the call, still encoded."""


def framed(body: bytes) -> bytes:
    """Return the bytes of a message as they are sent, with the length in front."""
    return HEADER.pack(len(body)) + body


def framed_pickle(message: Any) -> bytes:
    """Return a message of the parent as it is sent: pickled, with the length in front."""
    return framed(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))


def new_seals(count: int) -> tuple[int, ...]:
    """Return random seals for `count` calls."""
    return tuple(seal for (seal,) in SEAL.iter_unpack(secrets.token_bytes(SEAL.size * count)))


def garbled_text(body: bytes) -> str:
    """Return the error text for an unreadable message."""
    return f"{len(body)} bytes that are not a valid message: {body[:SHOWN_BYTES]!r}"


def ready_message(faults: Sequence[Fault], side_by_side: bool = False, traits: Any = None) -> bytes:
    """Encode `Ready` as the child sends it. `traits` must be values that JSON can express."""
    said = [[fault.place, fault.problem, fault.remedy, fault.code] for fault in faults]
    return framed(json.dumps([said, traits, side_by_side]).encode())


def read_ready(body: bytes, read_traits: Callable[[Any], T]) -> Ready[T | None]:
    """Decode a child's `Ready`, its traits by `read_traits`. Raises Garbled if the message is malformed."""
    try:
        faults, traits, side_by_side = cleaned(json.loads(body))
        found = tuple(_fault_in(fault) for fault in faults)
        return Ready(found, flag_in(side_by_side), None if found else read_traits(traits))
    except (ValueError, TypeError, RecursionError) as error:
        raise Garbled(garbled_text(body)) from error


def _fault_in(value: Any) -> Fault:
    """Return a decoded fault. Raises TypeError or ValueError if it is none."""
    place, problem, remedy, code = value
    if code not in get_args(FaultCode):
        raise ValueError("code")
    return Fault(text_in(place), text_in(problem), text_in(remedy), code)


def read_reply(body: bytes) -> Reply:
    """Decode a reply with clean texts, except what was returned. Raises Garbled if it is malformed."""
    try:
        text = body.decode()
        (number, seal, returned, remark), end = _scanned(text, 0)
        returned, remark = cleaned(returned), cleaned(remark)
    except (ValueError, TypeError, RecursionError, StopIteration) as error:
        raise Garbled(garbled_text(body)) from error
    if end == len(text) and type(number) is int and type(seal) is int:
        return Reply(number, seal, returned, remark)
    raise Garbled(garbled_text(body))


def text_in(value: Any) -> str:
    """Return a decoded text. Raises ValueError if it is none."""
    if type(value) is not str:
        raise ValueError("text")
    return value


def flag_in(value: Any) -> bool:
    """Return a decoded truth value. Raises ValueError if it is none."""
    if type(value) is not bool:
        raise ValueError("flag")
    return value


def receive(incoming: Any) -> Any:
    """Read and return the parent's next message. Return None if the parent has closed its end."""
    header = incoming.read(HEADER.size)
    return pickle.loads(incoming.read(HEADER.unpack(header)[0])) if len(header) == HEADER.size else None


async def receive_next(reader: asyncio.StreamReader) -> Any:
    """Read and return the parent's next message, like `receive`, as a coroutine."""
    try:
        return pickle.loads(await reader.readexactly(HEADER.unpack(await reader.readexactly(HEADER.size))[0]))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


class Served(ABC, Generic[C]):
    """The user code of a child."""

    side_by_side: bool
    """Whether calls run concurrently."""
    traits: Any
    """Traits that the parent needs, as values that JSON can express."""
    is_over = False
    """Whether the process must end after the latest reply."""

    @abstractmethod
    def calls(self, request: Any) -> Iterable[C]:
        """Return the calls of a request."""

    @abstractmethod
    def reply(self, call: C) -> bytes:
        """Make a call and return its reply. Any exception is the call's."""

    @abstractmethod
    async def awaited_reply(self, call: C) -> bytes:
        """Make a call and return its reply, like `reply`, beside other calls."""

    @abstractmethod
    def failure(self, call: C, error: BaseException) -> bytes:
        """Return the reply to a call that raised."""

    @abstractmethod
    def lateness(self, call: C) -> bytes:
        """Return the reply to a call that exceeded its deadline."""

    @abstractmethod
    def place_for(self, call: C) -> AbstractAsyncContextManager[Any]:
        """Return the context in which a concurrent call runs. Entering it may wait; the deadline begins afterwards."""


def serve(descriptor: int, parent: int, load: Callable[[A], Served[Any]]) -> None:
    """Serve calls until the parent closes the socket. This process dies with its parent.

    Processes that user code starts do not inherit the socket. If they become orphans, they become children of this
    process.

    Args:
        load: imports the user code. Raises ConfigError if that is impossible.
    """
    die_with(parent)
    adopt_orphans()
    outlive_sigterm()
    with socket.socket(fileno=descriptor) as connection:
        connection.set_inheritable(False)
        with connection.makefile("rb") as incoming:
            assignment: A = receive(incoming)
            # An allocation beyond the limit fails with an error, here and in each process that user code starts.
            resource.setrlimit(resource.RLIMIT_DATA, (assignment.memory_bytes, assignment.memory_bytes))
            try:
                served = load(assignment)
            except ConfigError as error:
                connection.sendall(ready_message(error.faults))
                return
            connection.sendall(ready_message((), served.side_by_side, served.traits))
            if served.side_by_side:
                asyncio.run(_side_by_side(connection, served, assignment.timeout))
            else:
                _in_turn(connection, incoming, served)


def outlive_sigterm() -> None:
    """Ignore SIGTERM, which may be sent to all processes of a run at once, but not in processes that user code starts.

    Those get the default action, and not the mask that this process has inherited.
    """
    signal.signal(signal.SIGTERM, lambda number, frame: None)  # a handler does not outlive exec, unlike SIG_IGN
    os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def _in_turn(connection: socket.socket, incoming: Any, served: Served[Any]) -> None:
    own = os.getpid()
    while (request := receive(incoming)) is not None:
        for call in served.calls(request):
            try:
                reply = served.reply(call)
            except BaseException as error:  # sys.exit() in user code must not end the process either
                reply = served.failure(call, error)
            if os.getpid() != own:  # this is a process that the user code forked
                os._exit(0)
            connection.sendall(reply)
            if served.is_over:
                return


async def _side_by_side(connection: socket.socket, served: Served[Any], seconds: float) -> None:
    own, running = os.getpid(), set[asyncio.Task[None]]()
    connection.setblocking(False)
    reader, writer = await asyncio.open_connection(sock=connection)

    async def run(call: Any) -> None:
        async with served.place_for(call):
            reply = await _in_time(served, call, seconds)
        if os.getpid() != own:
            os._exit(0)
        writer.write(reply)
        if served.is_over:
            writer.transport.set_write_buffer_limits(0)
            await writer.drain()
            os._exit(0)

    while (request := await receive_next(reader)) is not None:
        for call in served.calls(request):
            task = asyncio.create_task(run(call))
            running.add(task)
            task.add_done_callback(running.discard)
    os._exit(0)  # The parent is gone. A normal exit would wait for tasks that ignore cancellation.


async def _in_time(served: Served[Any], call: Any, seconds: float) -> bytes:
    deadline = asyncio.timeout(seconds)
    try:
        async with deadline:
            reply = await served.awaited_reply(call)
    except BaseException as error:
        reply = served.failure(call, error)
    # A call that ends after the deadline has timed out, whatever its result.
    return served.lateness(call) if deadline.expired() else reply
