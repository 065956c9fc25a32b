"""Signals while Ray runs. The driver keeps its handlers, and Ray's processes end only when the driver ends them.

A terminal, a batch system or a service manager may send a signal to all processes of a run at once. The driver then
finishes the step and writes a checkpoint, for which it needs all of them. They block SIGHUP and SIGTERM therefore (Ray
itself makes them block SIGINT). A mask of signals is inherited by the processes that they start.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import ray
from ray import _raylet
from ray._private import utils
from ray._private.node import Node

OF_ALL = frozenset({signal.SIGHUP, signal.SIGTERM})
"""Signals that may be sent to all processes of a run."""


@contextmanager
def blocked(numbers: Collection[signal.Signals]) -> Iterator[None]:
    """A context in which this thread, and the threads and processes that it starts, block signals."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def handler_kept() -> Iterator[None]:
    """A context in which Ray starts and the process keeps its handler of SIGTERM, also when Ray shuts down later.

    Ray replaces the handler thrice. Its two handlers in Python end the process without its cleanup. That of its core
    worker, in C++, ends it at once, and the end of the core worker leaves the default action, which does the same. A
    signal that arrives while one of these is installed waits until the own handler is back.
    """
    handler = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is not threading.main_thread():  # then Ray installs none in Python
        yield
        return

    class CoreWorker(_raylet.CoreWorker):  # pyright: ignore[reportAttributeAccessIssue]
        def __new__(cls, *given: Any) -> Any:
            with blocked({signal.SIGTERM}):
                made = super().__new__(cls, *given)
                signal.signal(signal.SIGTERM, handler)
            return made

        def __init__(self, *_: object) -> None:
            pass

        def shutdown_driver(self) -> None:
            now = signal.getsignal(signal.SIGTERM)
            with blocked({signal.SIGTERM}):
                super().shutdown_driver()
                signal.signal(signal.SIGTERM, now)

    with (
        patch.object(_raylet, "CoreWorker", CoreWorker),
        patch.object(utils, "set_sigterm_handler", lambda _: None),
    ):
        yield


def shut_down() -> None:
    """Disconnect from Ray, and kill the processes that it started here: they block the signal that Ray would send.

    Their child processes may outlive them.
    """
    kill = Node.kill_all_processes

    def kill_at_once(node: Node, check_alive: bool = True, allow_graceful: bool = False, wait: bool = False) -> None:
        kill(node, check_alive, allow_graceful=False, wait=wait)

    with patch.object(Node, "kill_all_processes", kill_at_once):
        ray.shutdown()
