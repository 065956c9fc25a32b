"""Messages between the test's process and the candidate's process: JSON, preceded by its length.

The other end is not trusted. JSON can only produce plain values, and the size of a message is limited.
"""

from __future__ import annotations

import json
import socket
import struct
import sys
from typing import Any

LENGTH = struct.Struct(">I")
LARGEST = 16 << 20
"""Largest number of bytes of a message."""
DIGITS = 50_000
"""Largest number of digits of an integer. The time that Python needs to parse an integer is quadratic in its length."""


class Broken(BaseException):
    """The other process has ended or violated the protocol. Not an `Exception`, so that a test does not catch it."""


class Channel:
    """One end of the socket."""

    def __init__(self, connection: socket.socket) -> None:
        sys.set_int_max_str_digits(DIGITS)
        self._connection = connection
        self._dumps, self._loads = json.dumps, json.loads
        self.broken = False

    def send(self, message: Any) -> None:
        """Send a message. Raises Broken if the other end is gone, ValueError if it is too large or not encodable."""
        body = self._dumps(message).encode("ascii")
        if len(body) > LARGEST:
            raise ValueError(
                f"a value of {len(body)} bytes is too large to be passed between the test and the candidate"
            )
        try:
            self._connection.sendall(LENGTH.pack(len(body)) + body)
        except OSError as error:
            self.broken = True
            raise Broken("the candidate's process is gone") from error

    def receive(self) -> Any:
        """Return the next message. Raises Broken if the other end is gone or the message is invalid."""
        (length,) = LENGTH.unpack(self._exactly(LENGTH.size))
        if length > LARGEST:
            self.broken = True
            raise Broken("a message is too large")
        body = self._exactly(length)
        try:
            return self._loads(body)
        except (ValueError, RecursionError) as error:
            self.broken = True
            raise Broken(f"a message cannot be read: {error}") from error

    def _exactly(self, size: int) -> bytes:
        received = bytearray()
        while len(received) < size:
            try:
                chunk = self._connection.recv(min(size - len(received), 1 << 16))
            except OSError:
                chunk = b""
            if not chunk:
                self.broken = True
                raise Broken("the candidate's process ended before it answered")
            received += chunk
        return bytes(received)
