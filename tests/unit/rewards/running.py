"""Helpers that start, end and inspect reward processes, with a clock that a test can advance."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from roll.config.schema.roles import RewardConfig
from roll.rewards.reward_workers import RewardProcess
from roll.types import Prompt, RewardResult
from tests import limits

LATE = f"no verdict after {limits.CALL:g} s"
PROMPT = Prompt(3, np.arange(4, dtype=np.int32), "text", "act", {"base": 100.0})


def open_channels() -> set[str]:
    """Return the open sockets and pipes of this process, including those that other tests left open."""
    places = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    return {
        target
        for place in places
        if os.path.lexists(place) and (target := os.readlink(place)).startswith(("socket:", "pipe:"))
    }


def reward_children() -> list[int]:
    """Return the PIDs of the reward processes of this process."""
    return children_of(b"roll.rewards.child")


def children_of(module: bytes) -> list[int]:
    """Return the PIDs of the descendants of this process that run a module."""
    found = []
    for pid in descendants(os.getpid()):
        with suppress(FileNotFoundError, ProcessLookupError):  # the process has ended
            found += [pid] if module in Path(f"/proc/{pid}/cmdline").read_bytes() else []
    return found


def descendants(pid: int) -> list[int]:
    """Return the PIDs of all descendants of `pid`, including those that earlier tests started."""
    found: list[int] = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (fields := stat_fields(int(entry))) and int(fields[1]) == pid:
            found += [int(entry), *descendants(int(entry))]
    return found


def stat_fields(pid: int) -> list[str]:
    """Return the fields state, parent, group, session, ... of /proc/PID/stat, or an empty list if there is no such
    process.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def gone(pids: list[int]) -> bool:
    """Return whether all processes have ended. A zombie counts as ended."""
    return all((stat_fields(pid) or ["Z"])[0] in "ZX" for pid in pids)


def section(**others: Any) -> RewardConfig:
    return RewardConfig.model_validate(
        {"reward": "faulty_rewards:act", "timeout": limits.CALL, "failed_value": -1.0, **others}
    )


@asynccontextmanager
async def process(start_seconds: float = limits.START, **others: Any) -> AsyncIterator[RewardProcess]:
    """Start a reward process, and close it at the end of the context."""
    rewards = RewardProcess("act", section(**others), start_seconds)
    try:
        await rewards.start()
        yield rewards
    finally:
        await rewards.close()


def scored(*responses: str, hangs_end: Path | None = None, **others: Any) -> list[RewardResult]:
    async def go() -> list[RewardResult]:
        async with process(**others) as rewards:
            return await rewards.score(PROMPT, responses)

    return run(go(), hangs_end)


class Clock(asyncio.SelectorEventLoop):
    """An event loop whose clock a test can advance, so that long deadlines expire at once."""

    skipped = 0.0

    def time(self) -> float:
        return super().time() + self.skipped


def skip(seconds: float) -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, Clock)
    loop.skipped += seconds


async def end_hangs(marks: Path) -> None:
    """Advance the clock past the deadline whenever a response hangs."""
    while True:
        hanging = marks / "hanging"
        if hanging.exists() and not gone([int(hanging.read_text())]):
            skip(limits.CALL)
        await asyncio.sleep(limits.LOOK)


def run(coroutine: Coroutine[Any, Any, Any], hangs_end: Path | None = None) -> Any:
    """Run a coroutine and return its result. If the folder of marker files is given, the deadlines of hanging responses
    expire.
    """

    async def bounded() -> Any:
        work = asyncio.ensure_future(coroutine)
        watch = asyncio.ensure_future(end_hangs(hangs_end)) if hangs_end else None
        try:
            await asyncio.to_thread(limits.until, work.done, "the test has ended", limits.PROCESS)
            return work.result()
        finally:
            work.cancel()
            if watch:
                watch.cancel()

    with asyncio.Runner(loop_factory=Clock) as runner:
        return runner.run(bounded())
