"""Messages between a process and its child that runs the user's code, each preceded by its length.

The parent sends pickles. The child sends JSON, which is read as plain values: nothing that is written to its socket runs in the
parent. Each call has a seal, a number that cannot be guessed; an answer counts once, and only with the seal of a call that is under way.
"""

from __future__ import annotations

import asyncio
import pickle
import secrets
import struct
from typing import Any

HEADER = struct.Struct(">Q")
SEAL = struct.Struct(">Q")
MOST_BYTES = 64 << 20
"""Largest size of a message from the child."""
SHOWN_BYTES = 40
"""Number of bytes of an unreadable message in an error."""


class Garbled(Exception):
    """The child sent an invalid message. `str()` gives the reason."""


def framed(body: bytes) -> bytes:
    """Return a message with its length in front, as it is sent."""
    return HEADER.pack(len(body)) + body


def encoded(message: Any) -> bytes:
    """Return a pickled message of the parent."""
    return framed(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))


def new_seals(count: int) -> tuple[int, ...]:
    """Return random seals for so many calls."""
    return tuple(seal for (seal,) in SEAL.iter_unpack(secrets.token_bytes(SEAL.size * count)))


def shown(body: bytes) -> str:
    """Return the error for an unreadable message."""
    return f"{len(body)} bytes that are no message: {body[:SHOWN_BYTES]!r}"


def receive(incoming: Any) -> Any:
    """Read the parent's next message. None if the other end is closed."""
    header = incoming.read(HEADER.size)
    return pickle.loads(incoming.read(HEADER.unpack(header)[0])) if len(header) == HEADER.size else None


async def receive_next(reader: asyncio.StreamReader) -> Any:
    """The same as a coroutine."""
    try:
        return pickle.loads(await reader.readexactly(HEADER.unpack(await reader.readexactly(HEADER.size))[0]))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
