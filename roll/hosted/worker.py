"""What the workers of user code have in common: a bounded log, as user code may print any amount of text."""

from __future__ import annotations

import asyncio
import os
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from roll.hosted.process import HostedProcess

S = TypeVar("S")
P = TypeVar("P", bound=HostedProcess[Any, Any])
SLACK = 60.0
"""Time in seconds for sending a call to a worker and its result back."""
LOG_DESCRIPTOR = 2
LOG_BYTES = 100 << 20
"""Largest size of a worker's log in bytes. The previous part, as large, is kept in a second file."""
LOOK_EVERY = 1.0
"""Seconds between two checks of the log's size."""


@dataclass(frozen=True)
class HostedSettings(Generic[S]):
    """Settings of a worker."""

    domain: str
    section: S
    """The domain's block of the configuration."""
    start_seconds: float
    """Deadline for the process to become ready."""


class HostedWorker(Generic[P]):
    """Runs in a Ray actor, whose log contains the output of the user code."""

    def __init__(self, process: P) -> None:
        self._process = process
        self._bounding: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the process and load its user code."""
        self._bounding = asyncio.create_task(_keep_log_bounded())
        await self._process.start()

    async def close(self) -> None:
        """End the process."""
        if self._bounding is not None:
            self._bounding.cancel()
        await self._process.close()


async def _keep_log_bounded() -> None:
    while True:
        await asyncio.to_thread(bound_log, LOG_DESCRIPTOR, LOG_BYTES)
        await asyncio.sleep(LOOK_EVERY)


def bound_log(descriptor: int, most_bytes: int) -> bool:
    """If the file of a descriptor has more than `most_bytes`, copy it to `<name>.1` and empty it. Return whether that
    was done.

    All writers must append to the file. Output between the copy and the truncation is lost. Pipes and terminals are not
    changed.
    """
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_size <= most_bytes:
        return False
    log = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
    if log.exists():
        shutil.copyfile(log, log.with_name(f"{log.name}.1"))
    os.ftruncate(descriptor, 0)
    os.write(
        descriptor,
        f"[the log exceeded {most_bytes} bytes; the previous {status.st_size} bytes are in {log.name}.1]\n".encode(),
    )
    return True
