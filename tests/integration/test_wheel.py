"""The wheel, installed in a separate environment without the checkout: its notebook trains the tiny task there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import limits
from tests.unit.docs.notebooks import TINY, code_of

pytestmark = [pytest.mark.engines, pytest.mark.full]

ROOT = Path(__file__).resolve().parents[2]
CELLS = """
import asyncio
import json
import sys

async def notebook():
    names = {"__name__": "__main__"}
    for number, cell in enumerate(json.load(sys.stdin)):
        exec(compile(cell, f"cell {number}", "exec"), names)
    print(json.dumps({"before": names["before"].value, "after": names["after"].value}))

asyncio.run(notebook())
"""
"""A program that runs cells as a notebook's kernel does: in one namespace, inside a running event loop."""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the interpreter of a new environment with the wheel. All other packages come from the current
    environment.
    """
    folder = tmp_path_factory.mktemp("wheel")
    build = [
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "--wheel-dir",
        str(folder),
        str(ROOT),
    ]
    subprocess.run([sys.executable, "-m", *build], check=True, timeout=limits.PROCESS)
    [wheel] = folder.glob("*.whl")
    venv.create(folder / "env", with_pip=False)
    python = folder / "env" / "bin" / "python"
    install = ["pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    subprocess.run([sys.executable, "-m", *install], check=True, timeout=limits.PROCESS)
    # Python searches a folder from a .pth file last, and ignores the .pth files in it, such as the one of the checkout.
    found = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
    )
    (Path(found.stdout.strip()) / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def run(python: Path, *arguments: str, folder: Path, given: str = "") -> str:
    """Run a command as in a shell with the environment of `python` activated, and return its output."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["PATH"] = f"{python.parent}{os.pathsep}{environment['PATH']}"
    done = subprocess.run(
        arguments,
        cwd=folder,
        input=given,
        env=environment,
        capture_output=True,
        text=True,
        timeout=limits.RUN,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_the_wheel_is_what_is_imported(installed: Path, tmp_path: Path) -> None:
    there = run(installed, "python", "-c", "import roll; print(roll.__file__)", folder=tmp_path)
    assert Path(there.strip()).is_relative_to(installed.parents[1])


def test_its_notebook_trains_the_tiny_task(installed: Path, tmp_path: Path, leaves_nothing: Callable[[], None]) -> None:
    printed = run(installed, "python", "-c", CELLS, folder=tmp_path, given=json.dumps(code_of(TINY)))
    accuracy = json.loads(printed.splitlines()[-1])
    assert accuracy["after"] > accuracy["before"] > 0.2
    leaves_nothing()


def test_its_commands_plan_a_shipped_experiment(installed: Path, tmp_path: Path) -> None:
    plan = run(installed, "roll", "--config-name", "rlvr_lora_zero3", "dry_run=true", folder=tmp_path)
    assert "actor_train" in plan and "deepspeed_train" in plan
    assert run(installed, "roll", "--version", folder=tmp_path).startswith("roll ")
