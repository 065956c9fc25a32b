"""A curriculum that replays rare successes, with the real engines: a killed run resumes exactly, and its report shows
the difficulty.
"""

from __future__ import annotations

import signal

import psutil
import pytest

from tests import limits
from tests.integration.conftest import World

pytestmark = [pytest.mark.engines, pytest.mark.full]
REPLAY = "{solve_rate_at_most: 0.5, staleness_at_most: 64, share: 0.5}"
STEPS = ("max_steps=6", "save_steps=2", "eval_steps=0", f"+curriculum={{hard_at_most: 0, replay: {REPLAY}}}")


def test_killed_run_resumes_with_its_curriculum(world: World) -> None:
    outcome = world.run(*world.rlvr("drawn", *STEPS))
    assert outcome.status == 0, outcome.output
    lines = world.metrics("drawn")[1:]
    assert all(0 <= line["curriculum/solve_rate"] <= 1 for line in lines)
    unseen = [line["curriculum/unseen_fraction"] for line in lines]
    assert unseen == sorted(unseen, reverse=True) and unseen[-1] < unseen[0] < 1
    assert sum(line["curriculum/replayed"] for line in lines) > 0, "groups were replayed"
    process = world.start(*world.rlvr("killed_drawn", *STEPS))
    world.wait_for_step("killed_drawn", 3, process)
    psutil.Process(process.pid).send_signal(signal.SIGKILL)
    process.communicate(timeout=limits.CALL)
    outcome = world.run(*world.rlvr("killed_drawn", *STEPS))
    assert outcome.status == 0, outcome.output
    world.assert_same_steps("killed_drawn", "drawn")
    assert "Difficulty of prompts" in (world.folder / "killed_drawn" / "report.html").read_text(encoding="utf-8")
