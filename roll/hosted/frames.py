"""Messages between a process and its child that runs user code. Each message is preceded by its length.

The parent sends pickles. The child sends JSON, so that user code that writes to the socket cannot run code in the
parent. Each call has a seal, which is a random number that cannot be guessed. An answer is accepted only once, and only
with the seal of a call in flight.
"""

from __future__ import annotations

import asyncio
import json
import pickle
import secrets
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar, get_args

from roll.errors import Fault, FaultCode

HEADER = struct.Struct(">Q")
SEAL = struct.Struct(">Q")
MOST_BYTES = 64 << 20
"""Largest size of a message from the child in bytes."""
SHOWN_BYTES = 40
"""Number of bytes of an unreadable message that an error shows."""
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
    """Decode the `Ready` of a child. `read_traits` raises TypeError or ValueError for invalid traits.

    Raises:
        Garbled: the message is malformed.
    """
    try:
        faults, traits, side_by_side = json.loads(body)
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
    """Decode a reply, except what was returned. Raises Garbled if it is malformed."""
    try:
        text = body.decode()
        (number, seal, returned, remark), end = _scanned(text, 0)
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
