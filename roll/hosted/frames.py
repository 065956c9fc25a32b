"""Messages between a process and its child that runs user code. Each message is preceded by its length.

The parent sends pickles. The child sends JSON, so that user code that writes to the socket cannot run code in the
parent. Each call has a seal, which is a random number that cannot be guessed. An answer is accepted only once, and only
with the seal of a call in flight.
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
"""Largest size of a message from the child in bytes."""
SHOWN_BYTES = 40
"""Number of bytes of an unreadable message that an error shows."""


class Garbled(Exception):
    """The child sent an invalid message. `str()` returns the reason."""


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
