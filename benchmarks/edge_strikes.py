"""Faults that a process of a run inflicts on itself, in a function of its own. Nothing in the run knows of them.

The campaign writes the faults to `strikes.json` in the folder that the environment variable `EDGE_FOLDER` names, and
creates `NAME.armed` when it is a fault's turn. The first process that then reaches the fault's place renames this file,
so that a fault strikes once, and leaves `NAME.struck` with its process id and the time.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = "EDGE_FOLDER"
CHUNK = bytes(1 << 16)
STRIKES = "strikes.json"
BACK_OFF_SECONDS = (1.0,)
"""Seconds before each restart. Runs with many faults would otherwise mostly wait."""
RECORDED = 1 << 20
"""Most groups of a step that a run records, so that all responses of two runs can be compared."""


@dataclass(frozen=True)
class Strike:
    """A fault at a place in a process."""

    name: str
    place: str
    """`module:Class.method`. The fault strikes when it is called, or when it returns."""
    log: str
    """Stem of the log file of the process, such as `actor_train-1`. Empty for any process that calls the method."""
    action: str
    """`kill`, `stop`, `exit` (with status 0), or `fill FOLDER` until no byte is free."""
    is_after: bool
    """Whether it strikes when the method returns."""


def claim(name: str) -> bool:
    """Whether this process is the one that a fault strikes now. Always False outside a campaign."""
    folder = os.environ.get(FOLDER)
    if folder is None:
        return False
    armed = Path(folder) / f"{name}.armed"
    try:
        armed.rename(claimed := armed.with_suffix(".claimed"))
    except FileNotFoundError:
        return False
    claimed.write_text(json.dumps({"pid": os.getpid(), "at": time.time()}))
    claimed.rename(armed.with_suffix(".struck"))
    return True


def act(action: str) -> None:
    """Inflict a fault on this process."""
    if action == "exit":
        os._exit(0)
    elif action.startswith("fill "):
        with suppress(OSError), (Path(action.removeprefix("fill ")) / "filler").open("wb", buffering=0) as file:
            while file.write(CHUNK):
                pass
    else:
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[action])


def install() -> None:
    """Wrap the methods at which faults strike, once their modules are imported. Shorten the back-off, and record all
    responses.
    """
    folder = os.environ.get(FOLDER)
    if folder is None:
        return
    from wrapt import when_imported

    when_imported("roll.runs.assemble")(lambda module: setattr(module, "BACK_OFF_SECONDS", BACK_OFF_SECONDS))
    when_imported("roll.tracking.jsonl")(record_all)
    for known in json.loads((Path(folder) / STRIKES).read_text()):
        strike = Strike(**known)
        when_imported(strike.place.partition(":")[0])(functools.partial(_wrap, strike))


def record_all(module: Any) -> None:
    """Raise the number of recorded groups, which no key of the configuration sets."""
    method = module.JsonlTracker.__init__
    names = list(inspect.signature(method).parameters)[-len(method.__defaults__) :]
    defaults = dict(zip(names, method.__defaults__, strict=True)) | {"groups_per_step": RECORDED}
    method.__defaults__ = tuple(defaults.values())


def _wrap(strike: Strike, module: Any) -> None:
    *outer, name = strike.place.partition(":")[2].split(".")
    owner = functools.reduce(getattr, outer, module)
    setattr(owner, name, striking(strike, getattr(owner, name)))


def striking(strike: Strike, method: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method with the fault in it."""

    @functools.wraps(method)
    def struck(*given: Any, **named: Any) -> Any:
        if not strike.is_after and _is_here(strike.log) and claim(strike.name):
            act(strike.action)
        result = method(*given, **named)
        if strike.is_after and _is_here(strike.log) and claim(strike.name):
            act(strike.action)
        return result

    return struck


def _is_here(log: str) -> bool:
    with suppress(OSError):
        return not log or Path("/proc/self/fd/1").readlink().stem == log
    return False
