"""The check that a test leaves nothing on the machine does not count what others use beside it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from roll.system.own_folder import PREFIX
from tests import limits
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
