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


def run(world: World, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words], cwd=world.folder, capture_output=True, text=True, timeout=limits.RUN, check=False
    )


def test_a_local_function_rewards_a_run(world: World, leaves_nothing: Callable[[], None]) -> None:
    [block] = [block for block in blocks("docs/running.md") if block.option("file") == "my_reward_run.py"]
    (world.folder / "my_reward_run.py").write_text(block.text)
    done = run(world, "my_reward_run.py")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert any(line.startswith("reward ") and line.endswith("after step 2") for line in done.stdout.splitlines())
    assert "'accuracy': Estimate(" in done.stdout

    more = block.text.replace('"max_steps": 2', '"max_steps": 3')
    (world.folder / "changed.py").write_text(more.replace("0.1 *", "0.2 *"))
    changed = run(world, "changed.py")
    assert changed.returncode == 1 and "close.py:close" in changed.stderr and "resume_with_changes" in changed.stderr

    command = ["-m", "roll.pipeline", "--config-path", "output/my_close", "--config-name", "config", "max_steps=3"]
    resumed = run(world, *command)
    assert resumed.returncode == 0, resumed.stdout[-3000:] + resumed.stderr[-3000:]
    assert "resumed from step 2" in resumed.stdout
    leaves_nothing()
