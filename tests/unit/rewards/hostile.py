"""A reward that attacks the process that runs it. A test copies this file to a temporary folder, where the reward
creates marker files.
"""

from __future__ import annotations

import builtins
import json
import os
import pickle
import stat
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from roll.types import Prompt, RewardResult

FOREVER = 3600
HOLDER = "import sys, time; held = bytearray(b'x') * int(sys.argv[1]); print(flush=True); time.sleep(3600)"


class Mark:
    """Creates a marker folder when it is unpickled."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(Path(__file__).with_name("ran")),)


class Judge:
    """Rewards a response with its length."""

    def value(self, response: str) -> float:
        return float(len(response))


def value_of(response: str) -> float:
    """Return the honest verdict."""
    return Judge().value(response)


def write(body: bytes, size: int | None = None) -> None:
    """Write a message to every socket of this process."""
    for name in os.listdir("/proc/self/fd"):
        try:
            is_socket = stat.S_ISSOCK(os.fstat(int(name)).st_mode)
        except OSError:
            continue
        if is_socket:
            os.write(int(name), struct.pack(">Q", len(body) if size is None else size) + body)


def answer(number: int, seal: int, value: Any = 1.0) -> bytes:
    """Return a message with a verdict, in the format of the child process."""
    return json.dumps([number, seal, [[value, "scored", {}, "", []]], ""]).encode()


def own() -> tuple[int, int]:
    """Return the number and the seal of the current call, which any code in the process can find."""
    frame = sys._getframe()
    while "call" not in frame.f_locals:
        assert frame.f_back is not None
        frame = frame.f_back
    return frame.f_locals["call"].number, frame.f_locals["call"].seal


def forge(response: str) -> None:
    """Write the forged message that the response names."""
    match response:
        case "a pickle":
            write(pickle.dumps(Mark()))
        case "guessed seals":
            for number in range(8):
                write(answer(number, number))
        case "one too many":
            write(answer(*own()))
            write(answer(*own()))
        case "an endless message":
            write(b"", 1 << 62)
        case "nested brackets":
            write(b"[" * 200000)
        case "no number":
            write(answer(*own(), float("nan")))
        case "too large":
            write(answer(*own(), 10**400))
        case "no result":
            write(json.dumps([*own(), [], ""]).encode())
        case "no text":
            write(b"\xff\xfe" * 100)


def replace(response: str) -> None:
    """Replace the part of the judging code that the response names."""
    match response:
        case "own function":
            globals()["value_of"] = lambda response: 99.0
        case "own code":
            value_of.__code__ = (lambda response: 99.0).__code__
        case "own method":
            Judge.value = lambda self, response: 99.0  # type: ignore[method-assign]
        case "own class":
            globals()["Judge"] = None
        case "deleted":
            del globals()["value_of"]
        case "builtin":
            builtins.len = lambda value: 99  # type: ignore[assignment]
        case "builtin for others":
            builtins.license = lambda: None


def hold(response: str) -> None:
    """Use as much memory, or start as many processes, as the response says."""
    match response.split():
        case ["allocate", size]:
            bytearray(int(size))
        case ["share", count, size]:
            for _ in range(int(count)):
                holder = subprocess.Popen([sys.executable, "-c", HOLDER, size], stdout=subprocess.PIPE)
                assert holder.stdout is not None
                holder.stdout.readline()
            time.sleep(FOREVER)
        case ["start", count]:
            for _ in range(int(count)):
                subprocess.Popen(["sleep", str(FOREVER)])
            time.sleep(FOREVER)


def act(prompt: Prompt, response: str, row: Any) -> Any:
    """Run the attack that the response names, and return 5. Reward the response `ok` honestly."""
    forge(response)
    replace(response)
    hold(response)
    return RewardResult(value_of(response)) if response == "ok" else 5.0


async def act_beside(prompt: Prompt, response: str, row: Any) -> Any:
    """Call `act` as an asynchronous reward, which runs concurrently with others."""
    return act(prompt, response, row)
