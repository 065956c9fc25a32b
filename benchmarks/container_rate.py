"""Measures how many containers of bubblewrap a machine starts, uses and ends per second, one after another, and checks
that nothing is left behind.

    python benchmarks/container_rate.py --containers 200

Each container gets a file, runs a command that reads it, and is ended; every tenth leaves processes in the background,
and every tenth is killed in the middle of a command. The status is 1 if an answer is wrong, or if a process, a mount, a
file or a control group is left behind.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil

from examples.tiny.make_image import write_machine_image
from roll.agents.containers.bubblewrap import BubblewrapContainer
from roll.agents.containers.container import ContainerBounds, ContainerFile
from roll.agents.containers.unpacked import UnpackedImage, unpacked

BOUNDS = ContainerBounds(memory_mib=256, disk_mib=32, processes=32)
END_SECONDS = 10.0
"""Deadline for killed processes to disappear."""


def left(folder: Path) -> dict[str, set[str]]:
    """Return the processes, mounts, files and control groups that containers may leave behind."""
    return {
        "processes": {str(pid) for pid in psutil.pids() if _has_mounted(pid, folder)},
        "mounts": set(Path("/proc/self/mounts").read_text().splitlines()),
        "files": {str(path) for path in folder.rglob("*")} | {str(path) for path in Path("/dev/shm").iterdir()},
        "control groups": {str(path) for path in Path("/sys/fs/cgroup").glob("*/*") if path.is_dir()},
    }


def _has_mounted(pid: int, folder: Path) -> bool:
    """Whether a process is in a container of an image in this folder. A zombie has no mounts."""
    with suppress(OSError):
        return str(folder) in Path(f"/proc/{pid}/mounts").read_text()
    return False


async def use(image: UnpackedImage, number: int) -> bool:
    """Use a container. Return whether it answered as it should."""
    container = await BubblewrapContainer.start(image, BOUNDS)
    try:
        await container.put({"/repo/text": ContainerFile(f"{number}\n".encode())})
        ran = await container.run(["sh", "-c", "cat text"], 60.0)
        if number % 10 == 0:
            await container.run(["sh", "-c", "sleep 1000 >/dev/null 2>&1 & sleep 1000 >/dev/null 2>&1 &"], 60.0)
        if number % 10 == 5:
            with suppress(TimeoutError):
                async with asyncio.timeout(0.01):
                    await container.run(["sleep", "1000"], 1000.0)
        return ran.status == 0 and ran.stdout == f"{number}\n".encode()
    finally:
        await container.close()


async def use_all(image: UnpackedImage, containers: int) -> int:
    """Use containers one after another. Return the number of right answers."""
    return sum([await use(image, number) for number in range(containers)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--containers", type=int, default=200)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_machine_image(folder / "image")
        begun = time.perf_counter()
        image = unpacked(folder / "image", folder / "cache")
        print(f"unpacked in {time.perf_counter() - begun:.2f} s; {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
        before, begun = left(folder), time.perf_counter()
        right = asyncio.run(use_all(image, given.containers))
        seconds = time.perf_counter() - begun
        spent = sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        print(f"{given.containers} containers in {seconds:.1f} s: {given.containers / seconds:.1f} per second")
        print(f"{right} right answers; {spent / given.containers:.3f} s of CPU each, without what ran in them")
        deadline = time.monotonic() + END_SECONDS
        while (found := left(folder)) != before and time.monotonic() < deadline:
            time.sleep(0.1)
        for kind, entries in found.items():
            print(f"{kind} left: {len(entries - before[kind])}")
    sys.exit(right < given.containers or any(found[kind] - before[kind] for kind in found))


if __name__ == "__main__":
    main()
