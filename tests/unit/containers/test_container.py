"""A container of bubblewrap: commands, files, limits, and what is left when it or its process ends."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest

from roll.agents.containers.bubblewrap import BubblewrapContainer
from roll.agents.containers.container import (
    MOST_OUTPUT,
    CommandEnd,
    CommandResult,
    ContainerBounds,
    ContainerFile,
    ContainerLost,
    ContainerSettings,
    FilesRefused,
)
from roll.agents.containers.pool import Containers
from roll.agents.containers.unpacked import UnpackedImage
from roll.rewards.sandbox.inside.commands import LINK
from tests import limits
from tests.unit.rewards.running import descendants

BOUNDS = ContainerBounds(memory_mib=64, disk_mib=16, processes=20)
T = TypeVar("T")


def within(image: UnpackedImage, use: Callable[[BubblewrapContainer], Awaitable[T]]) -> T:
    """Use a fresh container, and close it whatever happens."""

    async def used() -> T:
        container = await BubblewrapContainer.start(image, BOUNDS)
        try:
            return await use(container)
        finally:
            await container.close()

    return asyncio.run(used())


async def sh(container: BubblewrapContainer, command: str, seconds: float = limits.CALL) -> CommandResult:
    return await container.run(["sh", "-c", command], seconds)


def said(image: UnpackedImage, command: str, seconds: float = limits.CALL) -> CommandResult:
    """Return what a command does in a fresh container."""
    return within(image, lambda container: sh(container, command, seconds))


def test_files_and_commands_make_a_round_trip(ready: UnpackedImage) -> None:
    async def use(container: BubblewrapContainer) -> None:
        files = {
            "/repo/run": ContainerFile(b"#!/bin/sh\nread a < data/text; echo $a $A; echo bad >&2; exit 7", 0o755),
            "/repo/data/text": ContainerFile(b"hello\n\xff", 0o600),
            "/repo/link": ContainerFile(b"data/text", LINK),
        }
        await container.put(files)
        ran = await container.run(["./run"], limits.CALL, variables={"A": "b"})
        assert (ran.ending, ran.status, ran.stdout, ran.stderr) == (CommandEnd.EXITED, 7, b"hello b\n", b"bad\n")
        assert await container.get("/repo") == files
        await container.put({"/repo/data": ContainerFile(b"now a file")})
        assert await container.get("/repo/data") == {"/repo/data": ContainerFile(b"now a file")}
        for path, most in (("/missing", 100), ("/repo/run", 3)):
            with pytest.raises(FilesRefused):
                await container.get(path, most)
        with pytest.raises(FilesRefused):
            await container.put({"/repo/data/below": ContainerFile(b"")})
        assert (await container.run(["missing"], limits.CALL)).status == 127
        assert (await sh(container, "kill -9 $$")).status == -signal.SIGKILL

    within(ready, use)


def test_containers_share_nothing(ready: UnpackedImage) -> None:
    assert said(ready, "echo x > /usr/bin/cat; echo y > /new; ls /new").status == 0
    assert said(ready, "ls /new").status != 0 and (ready.root / "usr/bin/cat").stat().st_size > 2


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("cat /proc/1/environ", "Permission denied"),
        ("ls /proc/1/fd", "Permission denied"),
        ("kill -9 1; ls /.roll; echo here", "here"),
        ("ls /sys /home", "No such file"),
        ("cat /proc/net/dev", "lo:"),
        ("while read a b; do case $a in Cap[PE]* | NoNewPrivs:) echo $a $b;; esac; done < /proc/self/status",
         "CapPrm: 0000000000000000\nCapEff: 0000000000000000\nNoNewPrivs: 1"),
    ],
)  # fmt: skip
def test_commands_have_no_rights(ready: UnpackedImage, command: str, text: str) -> None:
    ran = said(ready, command)
    shown = (ran.stdout + ran.stderr).decode()
    assert text in shown and "eth0" not in shown


def test_a_late_command_ends_with_its_descendants(ready: UnpackedImage) -> None:
    async def use(container: BubblewrapContainer) -> None:
        seconds = 5 * limits.EXPIRY  # a busy host starts slowly
        late = await sh(container, "echo begun; for i in 1 2 3 4 5 6 7 8; do sleep 1000 & done; sleep 1000", seconds)
        assert (late.ending, late.status, late.stdout) == (CommandEnd.TIME, -signal.SIGKILL, b"begun\n")
        assert (await sh(container, "for p in /proc/[0-9]*; do cat $p/comm; done")).stdout.count(b"sleep") == 0

    within(ready, use)


def test_background_processes_stay_until_they_are_ended(ready: UnpackedImage) -> None:
    async def use(container: BubblewrapContainer) -> None:
        count = "for p in /proc/[0-9]*; do cat $p/comm; done"
        await sh(container, "sleep 1000 >/dev/null 2>&1 & sleep 1000 >/dev/null 2>&1 &")
        assert (await sh(container, count)).stdout.count(b"sleep") == 2
        await container.end_processes()
        assert (await sh(container, count)).stdout.count(b"sleep") == 0

    within(ready, use)


HOLD = "x=aaaaaaaaaaaaaaaa; for i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do x=$x$x; done"
"""Builds 16 MiB of text, which the shell then holds."""


@pytest.mark.parametrize(
    ("command", "ending", "text"),
    [
        ("while :; do cat /usr/bin/sh >> /tmp/full || exit 3; done", CommandEnd.EXITED, "No space left"),
        ("i=0; while :; do sleep 1000 & i=$((i+1)); [ $i -lt 40 ] || exit 3; done", CommandEnd.EXITED, "fork"),
        ("while :; do echo 0123456789; done | head -c 1000000", CommandEnd.EXITED, "0123456789"),
        (f"for each in 1 2 3 4 5 6; do ({HOLD}; read x < /dev/zero) & done; wait", CommandEnd.MEMORY, ""),
    ],
)
def test_a_limit_is_held(ready: UnpackedImage, command: str, ending: CommandEnd, text: str) -> None:
    ran = said(ready, command)
    assert ran.ending is ending and text in (ran.stdout + ran.stderr).decode()
    assert len(ran.stdout) <= MOST_OUTPUT


def test_a_dead_container_is_lost(ready: UnpackedImage) -> None:
    async def use(container: BubblewrapContainer) -> None:
        [child] = descendants(container._process.pid)
        os.kill(child, signal.SIGKILL)
        with pytest.raises(ContainerLost):
            await sh(container, "echo 1")
        with pytest.raises(ContainerLost):
            await sh(container, "echo 1")

    within(ready, use)


def test_a_cancelled_command_closes_the_container(ready: UnpackedImage) -> None:
    async def use(container: BubblewrapContainer) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(limits.EXPIRY):
                await sh(container, "sleep 1000")
        assert not container.is_alive and not descendants(container._process.pid)

    within(ready, use)


def test_a_container_that_cannot_start_is_lost(ready: UnpackedImage, tmp_path: Path) -> None:
    broken = UnpackedImage(tmp_path / "missing", ready.scratch, {}, "/")
    with pytest.raises(ContainerLost, match="missing"):
        asyncio.run(BubblewrapContainer.start(broken, BOUNDS))


def test_nothing_outlives_a_killed_process(ready: UnpackedImage) -> None:
    code = f"""
import asyncio
from pathlib import Path
from roll.agents.containers.bubblewrap import BubblewrapContainer
from roll.agents.containers.container import ContainerBounds
from roll.agents.containers.unpacked import UnpackedImage
async def hold():
    image = UnpackedImage(Path({str(ready.root)!r}), Path({str(ready.scratch)!r}), {{}}, "/repo")
    held = [await BubblewrapContainer.start(image, ContainerBounds()) for _ in range(2)]
    asking = asyncio.gather(*(one.run(["sleep", "1000"], 1000.0) for one in held))
    await asyncio.sleep(0)
    print("held", flush=True)
    await asking
asyncio.run(hold())
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        limits.until(lambda: len(descendants(process.pid)) >= 6, "two containers run", found=lambda: "")
        started = descendants(process.pid)
        process.kill()
    limits.until(
        lambda: not any(is_running(pid) for pid in started), "they end with it", limits.END, lambda: str(started)
    )
    assert not list(ready.scratch.iterdir())


def test_a_process_that_adopts_orphans_gets_none(ready: UnpackedImage) -> None:
    """Environment processes adopt orphans. Those of ended containers would count as their processes for ever."""
    code = f"""
import asyncio, psutil
from pathlib import Path
from roll.agents.containers.bubblewrap import BubblewrapContainer
from roll.agents.containers.container import ContainerBounds
from roll.agents.containers.unpacked import UnpackedImage
from roll.system.orphans import adopt_orphans
async def use():
    image = UnpackedImage(Path({str(ready.root)!r}), Path({str(ready.scratch)!r}), {{}}, "/repo")
    for _ in range(3):
        container = await BubblewrapContainer.start(image, ContainerBounds())
        await container.run(["sh", "-c", "sleep 1000 >/dev/null 2>&1 &"], 1000.0)
        await container.close()
adopt_orphans()
asyncio.run(use())
print(len(psutil.Process().children(recursive=True)))
"""
    words = [sys.executable, "-c", code]
    assert subprocess.run(words, capture_output=True, text=True, timeout=limits.PROCESS).stdout == "0\n"


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_warm_container_that_died_is_replaced(image: Path, cache: Path) -> None:
    async def use() -> None:
        pool = Containers(ContainerSettings(str(image), bounds=BOUNDS, cache=str(cache)))
        first = await pool.open()
        [warm] = [await task for task in pool._ready[str(image)]]
        assert isinstance(warm, BubblewrapContainer) and warm is not first
        os.kill(warm._process.pid, signal.SIGKILL)
        await limits.comes_true(lambda: not warm.is_alive, "the container is dead")
        second = await pool.open()
        assert second is not warm and (await second.run(["sh", "-c", "echo 1"], limits.CALL)).stdout == b"1\n"
        for container in (first, second):
            await container.close()
        await pool.close()

    asyncio.run(use())
    assert not [pid for pid in descendants(os.getpid()) if b"bwrap" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def test_container_that_starts_amid_a_cancellation_is_closed(image: Path, cache: Path) -> None:
    async def use() -> None:
        pool = Containers(ContainerSettings(str(image), bounds=BOUNDS, cache=str(cache)))
        await (await pool.open()).close()
        [warm] = pool._ready[str(image)]
        warm.add_done_callback(lambda _: opening.cancel())  # before the caller learns of the container
        opening = asyncio.create_task(pool.open())
        await asyncio.wait({opening}, timeout=limits.CALL)
        assert opening.cancelled() and not (await warm).is_alive
        await pool.close()

    asyncio.run(use())
    assert not [pid for pid in descendants(os.getpid()) if b"bwrap" in Path(f"/proc/{pid}/cmdline").read_bytes()]
