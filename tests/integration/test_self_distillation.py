"""Learning from feedback with the real engines: a run with an averaged teacher resumes exactly after a kill."""

from __future__ import annotations

import signal

import psutil
import pytest

from tests import limits
from tests.integration.conftest import World

pytestmark = [pytest.mark.engines, pytest.mark.full]

TAUGHT = (
    "+self_distillation={sees: [solution, success], teacher: averaged, update_rate: 0.3, weight: 0.5, "
    "prompt_length: 24, template: '{hints}{prompt}', solution_template: '{solution}>', success_template: '{success}>'}"
)


def test_killed_run_resumes_with_its_average(world: World) -> None:
    steps = ("max_steps=5", "save_steps=2", "eval_steps=0", TAUGHT)
    outcome = world.run(*world.rlvr("taught", *steps))
    assert outcome.status == 0, outcome.output
    lines = world.metrics("taught")[1:]
    assert [line["self_distillation/taught_fraction"] for line in lines] == [1.0] * 5
    assert all(line["self_distillation/solution_fraction"] == 1 for line in lines)
    assert all(line["self_distillation/gain_std"] > 0 and line["time/self_teacher"] > 0 for line in lines)
    process = world.start(*world.rlvr("killed_taught", *steps))
    world.wait_for_step("killed_taught", 3, process)
    psutil.Process(process.pid).send_signal(signal.SIGKILL)
    process.communicate(timeout=limits.CALL)
    outcome = world.run(*world.rlvr("killed_taught", *steps))
    assert outcome.status == 0, outcome.output
    world.assert_same_steps("killed_taught", "taught")
