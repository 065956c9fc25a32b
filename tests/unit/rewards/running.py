"""Reward processes under test: started and ended, watched from outside, with a clock that the test moves on."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from roll.config.schema.roles import RewardConfig
from roll.rewards.process import RewardProcess
from roll.types import Prompt, RewardResult
from tests import limits

LATE = f"no verdict after {limits.CALL:g} s"
PROMPT = Prompt(3, np.arange(4, dtype=np.int32), "text", "act", {"base": 100.0})


def open_channels() -> set[str]:
    """Sockets and pipes of this process: those to its children, beside whatever other tests have left open."""
    places = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    return {target for place in places if os.path.lexists(place) and (target := os.readlink(place)).startswith(("socket:", "pipe:"))}


def reward_children() -> list[int]:
    """Reward processes that this process holds."""
    return children_of(b"roll.rewards.child")


def children_of(module: bytes) -> list[int]:
    """Processes that this process holds which run a module."""
    found = []
    for pid in descendants(os.getpid()):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            found += [pid] if module in Path(f"/proc/{pid}/cmdline").read_bytes() else []
    return found


def descendants(pid: int) -> list[int]:
    """Processes in the tree beneath `pid`, those of earlier tests included."""
    found: list[int] = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (fields := stat_fields(int(entry))) and int(fields[1]) == pid:
            found += [int(entry), *descendants(int(entry))]
    return found


def stat_fields(pid: int) -> list[str]:
    """State, parent, group, session, ... of /proc/PID/stat; empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def gone(pids: list[int]) -> bool:
    """Whether none of the processes lives; a zombie does not."""
    return all((stat_fields(pid) or ["Z"])[0] in "ZX" for pid in pids)


def section(**others: Any) -> RewardConfig:
    return RewardConfig.model_validate({"reward": "faulty_rewards:act", "timeout": limits.CALL, "failed_value": -1.0, **others})


@asynccontextmanager
async def process(start_seconds: float = limits.START, **others: Any) -> AsyncIterator[RewardProcess]:
    """Started, and closed whatever happens."""
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
    """An event loop for which as much time passes besides as the test says, so that deadlines are long and expire at once."""

    skipped = 0.0

    def time(self) -> float:
        return super().time() + self.skipped


def skip(seconds: float) -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, Clock)
    loop.skipped += seconds


async def end_hangs(marks: Path) -> None:
    """Let the deadline expire whenever a response hangs."""
    while True:
        hanging = marks / "hanging"
        if hanging.exists() and not gone([int(hanging.read_text())]):
            skip(limits.CALL)
        await asyncio.sleep(limits.LOOK)


def run(coroutine: Coroutine[Any, Any, Any], hangs_end: Path | None = None) -> Any:
    """To its end. With the folder of the marks, responses that hang miss their deadline."""

    async def bounded() -> Any:
        work = asyncio.ensure_future(coroutine)
        watch = asyncio.ensure_future(end_hangs(hangs_end)) if hangs_end else None
        try:
            await asyncio.to_thread(limits.until, work.done, "the test has come to its end", limits.PROCESS)
            return work.result()
        finally:
            work.cancel()
            if watch:
                watch.cancel()

    with asyncio.Runner(loop_factory=Clock) as runner:
        return runner.run(bounded())
