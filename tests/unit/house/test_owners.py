"""Tests leave nothing on the machine, and their check does not count what others use beside them."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from roll.system.leftovers import SHARED_MEMORY
from roll.system.own_folder import PREFIX
from tests import limits
from tests.engines.outside import TEMPORARY, end_server
from tests.integration.conftest import _is_owned_elsewhere


def ended() -> int:
    """Return the id of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait(limits.PROCESS)
    return process.pid


@pytest.mark.parametrize(
    ("owner", "elsewhere"), [(lambda: 1, True), (os.getppid, True), (os.getpid, False), (ended, False)]
)
def test_folders_of_living_owners_elsewhere_are_known(owner: Callable[[], int], elsewhere: bool) -> None:
    assert _is_owned_elsewhere(f"{PREFIX}{owner()}-abcdefgh") is elsewhere


def test_files_without_an_owner_count_as_left() -> None:
    assert not any(map(_is_owned_elsewhere, ("psm_1-abc", "ray", f"{PREFIX}-1")))


SERVES = """
import multiprocessing.shared_memory, socket, subprocess, sys, tempfile, time
if len(sys.argv) == 2:
    subprocess.Popen([sys.executable, "-c", sys.argv[1], sys.argv[1], "child"])
    time.sleep(10 ** 6)
held = multiprocessing.shared_memory.SharedMemory(create=True, size=8)
door = socket.socket(socket.AF_UNIX)
path = f"{tempfile.gettempdir()}/{held.name.strip('/')}"
door.bind(path)
door.listen()
print(held.name.strip("/"), path, flush=True)
time.sleep(10 ** 6)
"""


def test_killed_server_leaves_neither_memory_nor_sockets(tmp_path: Path) -> None:
    """What a child of the server holds, as vLLM's engine does."""
    words = [sys.executable, "-c", SERVES, SERVES]
    own = tempfile.mkdtemp(dir=tmp_path)
    environment = os.environ | {TEMPORARY: own}
    server = subprocess.Popen(words, stdout=subprocess.PIPE, start_new_session=True, env=environment)
    try:
        assert server.stdout is not None
        name, path = server.stdout.readline().decode().split()
        assert (SHARED_MEMORY / name).exists() and Path(path).parent == Path(own)
    finally:
        end_server(server)
    assert not (SHARED_MEMORY / name).exists() and not list(tmp_path.iterdir())
