"""Asynchronous rewards that fail in many ways. A test copies this file to a temporary folder, where they create marker
files.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from roll.types import Prompt, RewardOutcome, RewardResult

FOREVER = 3600
RUNNING: set[str] = set()


def mark(name: str) -> Path:
    """Return the path of a marker file in the test's folder."""
    return Path(__file__).with_name(name)


async def marked(name: str) -> None:
    """Wait until the test or another call has created a marker file."""
    while not mark(name).exists():
        await asyncio.sleep(0.01)


def say_that_it_hangs() -> None:
    """Create the marker file `hanging`, which contains the PID of this process."""
    (unfinished := mark("unfinished")).write_text(str(os.getpid()))
    unfinished.rename(mark("hanging"))


async def act(prompt: Prompt, response: str, row: Any) -> Any:
    """Do what the words of the response name. Return the length of any other response."""
    match response.split():
        case ["after", other]:
            mark(f"begun {response}").touch()
            await marked(other)
        case ["last", *_]:
            mark(response).touch()
        case ["forever", *_]:
            try:
                await asyncio.sleep(FOREVER)
            finally:
                mark(f"cancelled {response}").touch()
        case ["late"]:
            try:
                await asyncio.sleep(FOREVER)
            except asyncio.CancelledError:
                return 1.0
        case ["swallow"]:
            say_that_it_hangs()
            while True:
                with suppress(asyncio.CancelledError):
                    await asyncio.sleep(FOREVER)
        case ["block", *others]:
            for other in others:
                await marked(f"begun after {other}")
            say_that_it_hangs()
            time.sleep(FOREVER)
        case ["exit", *others]:
            for other in others:
                await marked(f"begun after {other}")
            mark("hanging").touch()
            os._exit(3)
        case ["raise"]:
            raise KeyError("no such thing")
        case ["fork"]:
            if not os.fork():
                raise SystemExit(0)
            os.wait()
        case ["unavailable"]:
            return RewardResult(0.0, RewardOutcome.UNAVAILABLE, note="nobody answers")
    return len(response)


async def most_running(prompt: Prompt, response: str, row: Any) -> float:
    """Return the largest number of calls that ran at the same time as this one, including this one."""
    RUNNING.add(response)
    most = len(RUNNING)
    for _ in range(10):
        await asyncio.sleep(0)
        most = max(most, len(RUNNING))
    RUNNING.remove(response)
    return float(most)


def process_number(prompt: Prompt, response: str, row: Any) -> float:
    """Return the PID of the process that scores."""
    return float(os.getpid())


def longer_than(prompt: Prompt, responses: Sequence[str], row: Any) -> Any:
    """Reward each response with the number of shorter ones in the group, unless the first response names a special
    case.
    """
    match responses[0]:
        case "too few":
            return [1.0]
        case "no sequence":
            return 1.0
        case "raise":
            raise KeyError("no such thing")
        case "mixed":
            return [True, RewardResult(2.0, RewardOutcome.UNPARSABLE, note="nothing there"), "three", 4]
    return (sum(len(other) < len(response) for other in responses) for response in responses)


async def longer_than_awaited(prompt: Prompt, responses: Sequence[str], row: Any) -> Any:
    """Call `longer_than` asynchronously."""
    await asyncio.sleep(0)
    return longer_than(prompt, responses, row)
