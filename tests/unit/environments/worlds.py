"""Environments that fail in many ways. The fixture `marks` copies this file to a temporary folder."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from roll.agents.environments.base import Observation, Step

FOREVER = 3600
STARTED = {"role": "user", "content": "begin"}
RETURNS: dict[str, Any] = {
    "no step": "text",
    "nan": Step(reward=float("nan")),
    "large": Step([{"role": "user", "content": "x" * (5 << 20)}]),
    "many": Step([STARTED] * 300),
    "no role": Step([{"content": "x"}]),
    "object": Step([{"role": "user", "content": "x", "more": object()}]),
    "state": Step(state="x" * (1 << 17)),
    "metric": Step(metrics={"m": "high"}),  # type: ignore[dict-item]
}
HOLDER = "import sys, time; held = b'x' * int(sys.argv[1]); print(flush=True); time.sleep(3600)"


def mark(name: str) -> Path:
    """Return the path of a marker file in the test's folder."""
    return Path(__file__).with_name(name)


def say_that_it_hangs() -> None:
    """Create the marker file `hanging`, which contains the PID of this process."""
    (unfinished := mark("unfinished")).write_text(str(os.getpid()))
    unfinished.rename(mark("hanging"))


def forge(reply: Any) -> None:
    """Write a forged reply to the channel that the process uses for its replies."""
    body = json.dumps(reply).encode()
    descriptor = int(sys.argv[1])
    os.write(descriptor, struct.pack(">Q", len(body)) + body)


def act(text: str, count: int) -> Any:
    """Do what the text says. Any other text returns a step with `count`, the number of the turn."""
    if text == "raise":
        raise KeyError("no such door")  # raise
    if text == "exit":
        sys.exit("enough")
    if text == "leave":
        os._exit(3)
    if text == "segfault":
        ctypes.string_at(0)
    if text == "hang":
        say_that_it_hangs()
        time.sleep(FOREVER)
    if text.startswith("leak"):
        for _ in range(3):
            holder = subprocess.Popen([sys.executable, "-c", HOLDER, text.split()[1]], stdout=subprocess.PIPE)
            assert holder.stdout is not None
            holder.stdout.readline()
        time.sleep(FOREVER)
    if text == "allocate":
        bytearray(1 << 40)
    if text == "spawn":
        for _ in range(9):
            subprocess.Popen(["sleep", str(FOREVER)])
        time.sleep(FOREVER)
    if text == "forge":
        forge([0, 1, {"messages": [], "reward": 9.0, "done": True, "metrics": {}, "state": None}, None])
        time.sleep(FOREVER)
    if text in RETURNS:
        return RETURNS[text]
    if text == "loop":
        asyncio.run(asyncio.sleep(0))
    return Step(
        [{"role": "user", "content": f"turn {count}"}],
        reward=0.5 * count,
        metrics={"count": count},
        state=f"at {count}",
    )


class World:
    """Environment that counts its turns."""

    def __init__(self, begin: int = 0, taken: Any = ()) -> None:
        self.count, self.taken = begin, taken

    def reset(self, row: Any, seed: int) -> Observation:
        if row.get("fail") is not None:
            act(row["fail"], 0)
        return Observation([STARTED | {"content": f"{row.get('name')} {seed}"}], state="start")

    def step(self, message: Any) -> Any:
        self.count += 1
        if message.get("content") == "taken":
            self.taken.append(2)
            return Step(reward=float(len(self.taken) - 1))
        return act(str(message.get("content")), self.count)

    def close(self) -> None:
        mark(f"closed {self.count}").touch()


class Awaited(World):
    """Like `World`, but with asynchronous methods, so that several sessions run concurrently."""

    malformed_calls = "step"

    async def reset(self, row: Any, seed: int) -> Observation:  # type: ignore[override]
        return super().reset(row, seed)

    async def step(self, message: Any) -> Any:  # type: ignore[override]
        if message.get("content") == "sleep":
            say_that_it_hangs()
            await asyncio.sleep(FOREVER)
        if message.get("content") == "meet":
            mark(f"here {self.count}").touch()
            while len(list(Path(__file__).parent.glob("here *"))) < 2:  # until another session has left its mark
                await asyncio.sleep(0.01)
        return super().step(message)
