"""The main loop of a child process that runs user code; `process.py` is the parent's side.

    process.py                              child
      ── Assignment ──────────────────────▶  imports the user code
      ◀─────────────────────────── Ready ──
      ── [request] ───────────────────────▶  one or more calls in each request
      ◀── Reply ── ..                        one for each call, as soon as the call ends

If the user code is asynchronous, calls run concurrently, and the child itself ends calls that exceed the deadline.
Otherwise it makes one call at a time, in the order in which they arrive.

The socket is separate from stdout and stderr, so it never carries output that user code prints.
"""

from __future__ import annotations

import asyncio
import os
import resource
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager
from typing import Any, Generic, TypeVar

from roll.errors import ConfigError
from roll.hosted.frames import Assignment, ready_message, receive, receive_next
from roll.system.orphans import adopt_orphans, die_with

A = TypeVar("A", bound=Assignment)
C = TypeVar("C")


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
