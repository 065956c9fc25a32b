"""A relay between a client and a store's server, which can hold requests back, refuse them or end connections."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress

REFUSAL = b"<?xml version='1.0'?><Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
DENIED = b"HTTP/1.1 403 Forbidden\r\nContent-Type: application/xml\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"


class Relay:
    """Listens on a port of this machine. `act_at` says what happens from the first request with a text on."""

    def __init__(self, target: int) -> None:
        """`target` is the server's port."""
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.reached = threading.Event()
        """Set by the first request with the text."""
        self._text, self._action, self._passes = b"", "", threading.Event()
        threading.Thread(target=self._listen, daemon=True).start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def act_at(self, text: str, action: str) -> None:
        """Choose `hold` (that request alone), `refuse` or `vanish` (all requests from then on)."""
        self._text, self._action = text.encode(), action
        self.reached.clear()
        self._passes.clear()

    def pass_on(self) -> None:
        """Pass everything on, also what was held back."""
        self._action = ""
        self._passes.set()

    def _listen(self) -> None:
        while True:
            with suppress(OSError):
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target))
                threading.Thread(target=self._requests, args=(client, server), daemon=True).start()
                threading.Thread(target=_pump, args=(server, client), daemon=True).start()

    def _requests(self, client: socket.socket, server: socket.socket) -> None:
        with suppress(OSError):
            while contents := client.recv(1 << 16):
                if self._action and self._text in contents:
                    self.reached.set()
                    if self._action == "hold":
                        self._passes.wait()
                if self.reached.is_set() and self._action == "vanish":
                    break
                if self.reached.is_set() and self._action == "refuse":
                    client.sendall(DENIED % len(REFUSAL) + REFUSAL)
                    break
                server.sendall(contents)
        _end(client, server)


def _pump(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while contents := source.recv(1 << 16):
            target.sendall(contents)
    _end(source, target)


def _end(*sockets: socket.socket) -> None:
    for one in sockets:
        with suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
