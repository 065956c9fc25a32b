"""ROLL's keys whose meaning lies in another block here."""

from __future__ import annotations

from typing import Any

import pytest

from roll.config.translate import translate


@pytest.mark.parametrize(
    ("values", "seconds"),
    [
        ({"actor_train": {"backend_timeout": 30}}, 1800),
        ({"actor_train": {"backend_timeout": 30}, "reference": {"backend_timeout": 45.5}}, 2730.0),
        ({"actor_train": {"backend_timeout": 30}, "deadlines": {"collective": 60}}, 60),
    ],
)
def test_minutes_of_a_role_are_the_seconds_of_all(values: dict[str, Any], seconds: float) -> None:
    done = translate(values, "")
    assert done.values["deadlines"] == {"collective": seconds}
    roles = [role for role in values if role != "deadlines"]
    assert not done.faults and all(done.values[role] == {} for role in roles)
    assert [warning.split(":")[0] for warning in done.warnings] == [f"{role}.backend_timeout" for role in roles]
    assert all(f"is {seconds} s" in warning for warning in done.warnings)


@pytest.mark.parametrize("value", ["long", -3, True])
def test_what_is_no_number_of_minutes_is_a_fault(value: object) -> None:
    done = translate({"actor_train": {"backend_timeout": value}}, "")
    assert [fault.place for fault in done.faults] == ["actor_train.backend_timeout"]
    assert not done.warnings and "deadlines" not in done.values
