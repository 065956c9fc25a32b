"""The start of a child process that runs user code; `contained.py` is the parent's side."""

from __future__ import annotations

import resource
import socket
from collections.abc import Generator
from contextlib import contextmanager
from typing import BinaryIO

from roll.system.orphans import adopt_orphans, die_with


@contextmanager
def serving_parent(descriptor: int, parent: int) -> Generator[tuple[socket.socket, BinaryIO]]:
    """A context that yields the socket to the parent and a stream of the parent's messages. This process dies with its
    parent.

    Processes that user code starts do not inherit the socket. If they become orphans, they become children of this
    process.
    """
    die_with(parent)
    adopt_orphans()
    with socket.socket(fileno=descriptor) as connection:
        connection.set_inheritable(False)
        with connection.makefile("rb") as incoming:
            yield connection, incoming


def bound_memory(most_bytes: int) -> None:
    """Limit the memory of this process and of each process that it starts. An allocation beyond the limit fails with an
    error.
    """
    resource.setrlimit(resource.RLIMIT_DATA, (most_bytes, most_bytes))
