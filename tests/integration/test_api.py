"""The Python API example of docs/running.md, run inside an event loop with the real engines."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

from tests import limits
from tests.integration.conftest import World
from tests.unit.docs.pages import blocks

pytestmark = [pytest.mark.engines, pytest.mark.full]


def test_a_notebook_trains_and_evaluates(world: World, leaves_nothing: Callable[[], None]) -> None:
    [block] = [block for block in blocks("docs/running.md") if block.option("file") == "my_training.py"]
    cell = f"import asyncio\n\nasync def cell():\n    exec({block.text!r}, {{}})\n\nasyncio.run(cell())\n"
    done = subprocess.run(
        [sys.executable, "-c", cell], cwd=world.folder, capture_output=True, text=True, timeout=limits.RUN, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    leaves_nothing()
    said = done.stdout.splitlines()
    assert any(line.startswith("loss ") and line.endswith("after step 2") for line in said)
    assert any("Estimate(value=" in line for line in said)
