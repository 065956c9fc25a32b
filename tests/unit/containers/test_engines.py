"""Containers of podman and docker, where this machine has one, answer as those of bubblewrap do."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from examples.tiny.make_image import PROGRAMS, layer, program_files
from roll.agents.containers.command_line import CommandLineContainer, remove_orphans
from roll.agents.containers.container import (
    CommandEnd,
    ContainerBounds,
    ContainerFile,
    ContainerLost,
    ContainerSettings,
    FilesRefused,
)
from roll.agents.containers.layout import BadImage
from roll.agents.containers.pool import Containers
from roll.rewards.sandbox.inside.commands import LINK
from tests import limits

NAME = "localhost/roll-test:1"
BOUNDS = ContainerBounds(memory_mib=64, disk_mib=16, processes=50)


def works(engine: str) -> bool:
    if shutil.which(engine) is None:
        return False
    return not subprocess.run([engine, "info"], capture_output=True, timeout=limits.PROCESS).returncode


@pytest.fixture(params=["podman", "docker"])
def engine(request: pytest.FixtureRequest) -> Iterator[str]:
    """Return an engine that has the image NAME."""
    if not works(request.param):
        warnings.warn(f"{request.param} does not run here, so its containers are not tested", stacklevel=1)
        pytest.skip(f"{request.param} does not run here")
    packed = layer(program_files(PROGRAMS), {"bin": "usr/bin"})
    subprocess.run([request.param, "import", "-", NAME], input=packed, check=True, timeout=limits.PROCESS)
    yield request.param
    subprocess.run([request.param, "rmi", "-f", NAME], timeout=limits.PROCESS)


@pytest.mark.full
def test_an_engine_answers_as_bubblewrap_does(engine: str) -> None:
    async def use() -> None:
        pool = Containers(ContainerSettings(NAME, engine=engine, bounds=BOUNDS, warm=0))  # type: ignore[arg-type]
        pool.prepare()
        container = await pool.open()
        files = {
            "/repo/run": ContainerFile(b"#!/bin/sh\nread first < text; echo $first $A; echo bad >&2; exit 7", 0o755),
            "/repo/text": ContainerFile(b"hello\n", 0o600),
            "/repo/link": ContainerFile(b"text", LINK),
        }
        await container.put(files)
        ran = await container.run(["./run"], limits.CALL, "/repo", {"A": "b"})
        assert (ran.ending, ran.status, ran.stdout, ran.stderr) == (CommandEnd.EXITED, 7, b"hello b\n", b"bad\n")
        assert await container.get("/repo") == files
        with pytest.raises(FilesRefused):
            await container.get("/missing")
        late = await container.run(["sh", "-c", "sleep 1000"], limits.EXPIRY)
        assert late.ending is CommandEnd.TIME
        assert b"sleep" not in (await container.run(["sh", "-c", "cat /proc/[0-9]*/comm"], limits.CALL)).stdout
        lost = await pool.open()
        assert isinstance(lost, CommandLineContainer)
        subprocess.run([engine, "rm", "-f", "-t", "0", lost._name], check=True, timeout=limits.PROCESS)
        with pytest.raises(ContainerLost):
            await lost.run(["sh", "-c", "exit 1"], limits.CALL)
        await container.close()
        await pool.close()

    asyncio.run(use())
    listed = subprocess.run([engine, "ps", "-aq"], capture_output=True, text=True, timeout=limits.PROCESS).stdout
    assert not listed.split()


@pytest.mark.full
def test_orphans_of_an_engine_are_removed(engine: str, tmp_path: Path) -> None:
    words = [
        engine,
        "run",
        "-d",
        "--network",
        "none",
        "--label",
        f"roll.owner={tmp_path}/gone",
        "--entrypoint",
        "sleep",
    ]
    words += ["--ulimit", "nofile=1024:1024", NAME, "1000"]
    name = subprocess.run(words, check=True, capture_output=True, text=True, timeout=limits.PROCESS).stdout.strip()
    assert len(asyncio.run(remove_orphans(engine))) == 1
    assert subprocess.run([engine, "inspect", name], capture_output=True, timeout=limits.PROCESS).returncode


@pytest.mark.full
def test_an_unknown_name_is_refused(engine: str) -> None:
    with pytest.raises(BadImage) as caught:
        Containers(ContainerSettings("localhost/no-such-image:1", engine=engine)).prepare()  # type: ignore[arg-type]
    assert caught.value.code == "not_found"


@pytest.mark.parametrize("turns_of_loop", [*range(10), None])
def test_a_cancelled_start_removes_its_container(turns_of_loop: int | None, tmp_path: Path) -> None:
    """The engine here is a script that notes what it is asked to do."""
    engine, asked = tmp_path / "engine", tmp_path / "asked"
    engine.write_text(f'#!/bin/sh\necho "$1" >> {asked}\n[ "$1" != run ] || exec sleep 1000000\n')
    engine.chmod(0o755)
    asked.touch()

    before = set(psutil.Process().children())

    def runs() -> bool:
        return "run" in asked.read_text()

    async def work() -> None:
        starting = asyncio.create_task(CommandLineContainer.start(str(engine), NAME, BOUNDS, tmp_path))
        if turns_of_loop is None:
            await limits.comes_true(runs, "a container is started")
        for _ in range(turns_of_loop or 0):
            await asyncio.sleep(0)
        if set(psutil.Process().children()) - before:
            limits.until(runs, "a container is started")
        starting.cancel()
        await asyncio.wait({starting}, timeout=limits.CALL)
        assert starting.cancelled()

    asyncio.run(work())
    assert asked.read_text().split() in ([], ["run", "kill", "rm"]) and set(psutil.Process().children()) <= before
