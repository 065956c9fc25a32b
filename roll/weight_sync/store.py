"""The key-value stores through which the members of a process group find each other.

torch's own rendezvous listens on all interfaces, and whoever reaches the port can read and write the keys. So members
on one host use a file in a folder that only their user can enter. Members on several hosts use a server that listens on
a single address; it asks for no proof of identity, so the network must keep strangers away.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

from torch import distributed as dist

from roll.weight_sync.routes import MeetingPoint

BACKLOG = 1024
"""Connections that may wait until the server accepts them."""


def open_store(point: MeetingPoint, hosts: bool, seconds: float) -> Any:
    """Open the store of a process group.

    Args:
        hosts: whether this process is the member that runs the server, if there is one.
        seconds: deadline of every operation on the store.

    Raises:
        OSError: the address cannot be listened on.
        torch.distributed.DistNetworkError: the server does not answer.
    """
    limit = timedelta(seconds=seconds)
    if point.file:
        store = dist.FileStore(point.file, -1)  # pyright: ignore[reportPrivateImportUsage]
        store.set_timeout(limit)
        return store
    listener = listen_at(point.address, point.port) if hosts else None
    return dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
        point.address,
        point.port,
        None,
        hosts,
        limit,
        wait_for_workers=False,
        master_listen_fd=None if listener is None else listener.detach(),
    )


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
