"""SIGTERM to a run in each of its phases, once and twice, to the driver alone and to all processes at once."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from contextlib import suppress

import psutil
import pytest

from roll.runs.interrupt import SAME_SECONDS
from tests import limits
from tests.integration.conftest import World

pytestmark = [pytest.mark.engines, pytest.mark.full]
APART = 1.2 * SAME_SECONDS
"""Seconds between two signals that count as two."""


def send(run: psutil.Process, to_all: bool) -> None:
    for process in [run, *(run.children(recursive=True) if to_all else ())]:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGTERM)


@pytest.mark.parametrize("to_all", [False, True], ids=["to the driver", "to all processes"])
@pytest.mark.parametrize("second", [None, "step", "checkpoints/.step_*", "end.json"])
def test_signals_end_a_run_with_its_status(
    world: World, leaves_nothing: Callable[[], None], second: str | None, to_all: bool
) -> None:
    """The first signal arrives in the loop. The second follows in the loop, or once a file of this name exists."""
    name = f"signalled_{to_all}_{(second or 'once').strip('./*').replace('/', '_')}"
    process = world.start("--config-name", "tiny/tiny_warm_up", f"output_dir={name}", "max_steps=4000", "save_steps=0")
    run, folder = psutil.Process(process.pid), world.folder / name
    world.wait_for_step(name, 2, process)
    send(run, to_all)
    if second is not None:
        time.sleep(APART if second == "step" else limits.NONE)
        limits.until(
            lambda: second == "step" or any(folder.glob(second)) or process.poll() is not None, f"{second} exists"
        )
        with suppress(psutil.NoSuchProcess):
            send(run, to_all)
    outcome = world.wait(process)
    assert outcome.status == 130 and "Traceback" not in outcome.output, outcome.output
    end = json.loads((folder / "end.json").read_text())
    assert end["outcome"] == "interrupted" and (folder / "report.html").is_file()
    assert "saved: " in outcome.output and any((folder / "checkpoints").glob("step_*"))
    leaves_nothing()
