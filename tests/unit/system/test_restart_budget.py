"""Restarts are bounded in number, and later ones wait longer."""

from __future__ import annotations

import pytest

from roll.system.restart_budget import HOUR, RestartBudget

LONG_AGO = [-2 * HOUR, -HOUR]


@pytest.mark.parametrize(
    ("budget", "restarts", "delay"),
    [
        (RestartBudget(0), [], None),
        (RestartBudget(2), [], 0.0),
        (RestartBudget(2), [-1.0], 0.0),
        (RestartBudget(2), [-3.0, -1.0], None),
        (RestartBudget(2), LONG_AGO, None),
        (RestartBudget(2, within=HOUR), LONG_AGO, 0.0),
        (RestartBudget(2, within=HOUR), [*LONG_AGO, -1.0], 0.0),
        (RestartBudget(2, within=HOUR), [-HOUR, 1.0 - HOUR, -1.0], None),
        (RestartBudget(9, back_off=(5.0, 30.0)), [], 5.0),
        (RestartBudget(9, back_off=(5.0, 30.0)), [-1.0], 30.0),
        (RestartBudget(9, back_off=(5.0, 30.0)), [-3.0, -2.0, -1.0], 30.0),
        (RestartBudget(9, back_off=(5.0, 30.0)), [*LONG_AGO, -1.0], 30.0),
    ],
)
def test_delay_depends_on_recent_restarts(budget: RestartBudget, restarts: list[float], delay: float | None) -> None:
    assert budget.delay(restarts, 0.0) == delay
