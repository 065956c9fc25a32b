"""The process that runs the candidate, which is the program under test. It cannot influence the verdict."""

from __future__ import annotations

import ast
import atexit
import os
import socket
import sys
import threading
import traceback
import types
from collections.abc import Callable
from typing import Any, NoReturn

from roll.rewards.sandbox.inside.link import Link
from roll.rewards.sandbox.inside.usual import provide
from roll.rewards.sandbox.inside.wire import Channel

NOT_COMPILED = 97
"""Exit status of a program that cannot be compiled."""
FILE = "solution.py"


def run_candidate(source: str) -> NoReturn:
    """Run the program as a script, and exit as the Python interpreter would."""
    os._exit(_status_of(lambda: _execute(source, "__main__")))


def serve_program(source: str, connection: socket.socket) -> NoReturn:
    """Run the program as a module, and then serve the requests of the test's process."""

    def load_and_serve() -> None:
        module = _execute(source, "solution")

        def answer(kind: str, parts: list[Any]) -> Any:
            match kind, parts:
                case "names", []:
                    return {name: value for name, value in vars(module).items() if _is_own(name, value)}
                case "await", [int() as handle]:
                    import asyncio

                    return asyncio.run(link.exported(handle))
            raise ValueError(f"unknown request '{kind}'")

        link = Link(Channel(connection), guarded=False, others=answer)
        link.serve()

    os._exit(_status_of(load_and_serve))


def _is_own(name: str, value: Any) -> bool:
    return not name.startswith("__") and not isinstance(value, types.ModuleType)


def _execute(source: str, name: str) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__file__ = FILE
    sys.modules[name] = module
    try:
        tree = ast.parse(source, FILE)
        code = compile(tree, FILE, "exec", dont_inherit=True)
    except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError) as error:
        _complain("".join(traceback.format_exception_only(error)))
        os._exit(NOT_COMPILED)
    provide(tree, vars(module))
    exec(code, vars(module))
    return module


def _status_of(work: Callable[[], Any]) -> int:
    """Run the work as the Python interpreter runs a program, including its shutdown. Return the exit status."""
    status = 0
    try:
        work()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException as error:
        _complain("".join(traceback.format_exception_only(error)))
        status = 1
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as the shutdown of Python does
        atexit._run_exitfuncs()
        sys.stdout.flush()
    except BaseException as error:
        _complain("".join(traceback.format_exception_only(error)))
        status = status or 1
    return status & 0xFF


def _complain(message: str) -> None:
    os.write(2, message.encode("utf-8", "replace")[-4000:])
