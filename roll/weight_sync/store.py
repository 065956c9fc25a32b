"""The key-value stores through which the members of a process group find each other.

torch's own rendezvous listens on all interfaces, and whoever reaches the port can read and write the keys. So members
on one host use a file in a folder that only their user can enter. Members on several hosts use a server that listens on
a single address; it asks for no proof of identity, so the network must keep strangers away.
"""

from __future__ import annotations

import os
import socket
import time
from datetime import timedelta
from typing import Any

from torch import distributed as dist

from roll.errors import HostUnreachable
from roll.system.addresses import NODE
from roll.weight_sync.routes import MeetingPoint

CONNECT_SECONDS, UNREACHED_SECONDS = 10.0, 60.0
"""Deadlines for one connection to the server, and for its host to be reached at all."""
KNOCK_EVERY = 0.2
"""Seconds between two tries to connect."""
BACKLOG = 1024
"""Connections that may wait until the server accepts them."""


def open_store(point: MeetingPoint, hosts: bool, seconds: float) -> Any:
    """Open the store of a process group.

    Args:
        hosts: whether this process is the member that runs the server, if there is one.
        seconds: deadline of every operation on the store.

    Raises:
        OSError: the address cannot be listened on.
        HostUnreachable: the server's host cannot be reached.
        TimeoutError: the host can be reached, but no server has opened within `seconds`.
    """
    limit = timedelta(seconds=seconds)
    if point.file:
        store = dist.FileStore(point.file, -1)  # pyright: ignore[reportPrivateImportUsage]
        store.set_timeout(limit)
        return store
    listener = listen_at(point.address, point.port) if hosts else None
    if not hosts:
        _knock(point, seconds)
    return dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
        point.address,
        point.port,
        None,
        hosts,
        limit,
        wait_for_workers=False,
        master_listen_fd=None if listener is None else listener.detach(),
    )


def _knock(point: MeetingPoint, seconds: float) -> None:
    """Wait until the server listens. torch would not tell a host that cannot be reached from a server that is late."""
    start = time.monotonic()
    while True:
        try:
            socket.create_connection((point.address, point.port), CONNECT_SECONDS).close()
            return
        except ConnectionRefusedError as error:
            if time.monotonic() > start + seconds:
                where = f"{point.address}:{point.port}"
                raise TimeoutError(f"timed out: nobody listens at {where}, where the first rank invites") from error
        except OSError as error:
            if time.monotonic() > start + min(seconds, UNREACHED_SECONDS):
                own = os.environ.get(NODE, "this host")
                raise HostUnreachable(
                    f"{own} cannot connect to {point.address}:{point.port}, where the first rank invites: "
                    f"{error.strerror or 'no answer'}; let the hosts reach each other at Ray's addresses on all ports, "
                    f"or start Ray with another --node-ip-address"
                ) from error
        time.sleep(KNOCK_EVERY)


def listen_at(address: str, port: int) -> socket.socket:
    """Return a socket that listens at one address of this host. Raises OSError, which names the address."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        message = f"{error.strerror}: {address}:{port}, where the ranks of a role meet"
        raise OSError(error.errno, message) from error
    return listener
