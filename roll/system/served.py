"""First actions of a child that runs the user's code; `contained.py` is the parent's side."""

from __future__ import annotations

import resource
import socket
from collections.abc import Generator
from contextlib import contextmanager
from typing import BinaryIO

from roll.system.orphans import adopt_orphans, die_with


@contextmanager
def served(descriptor: int, parent: int) -> Generator[tuple[socket.socket, BinaryIO]]:
    """Yield the socket to the parent and its messages. This process dies with its parent.

    Processes that the user's code starts do not inherit the socket. Orphans among them become children of this process.
    """
    die_with(parent)
    adopt_orphans()
    with socket.socket(fileno=descriptor) as connection:
        connection.set_inheritable(False)
        with connection.makefile("rb") as incoming:
            yield connection, incoming


def bound_memory(most_bytes: int) -> None:
    """Bound the memory of this process and of each that it starts: an allocation beyond it fails where it is made."""
    resource.setrlimit(resource.RLIMIT_DATA, (most_bytes, most_bytes))
