"""The states of engines and their transitions, with a fake clock."""

from __future__ import annotations

import random

import pytest

from roll.engines.pool import MOST_LATE, PRESENT, RESTARTS, SERVING, EngineHealth, EngineState


def test_a_death_a_restart_and_the_way_back() -> None:
    now = [10.0]
    health = EngineHealth(2, lambda: now[0])
    assert health.died(1) and health.state(1) is EngineState.DEAD
    assert not health.died(1), "a known death is not counted again"
    assert health.in_states(SERVING) == [0]
    health.restarting(1)
    assert health.state(1) is EngineState.RESTARTING and health.in_states(PRESENT) == [0]
    now[0] = 14.5
    assert health.loaded(1) == 4.5
    assert (
        health.state(1) is EngineState.STALE
        and health.in_states(SERVING) == [0]
        and health.in_states(PRESENT) == [0, 1]
    )
    health.has_weights(1)
    assert health.in_states(SERVING) == [0, 1] and (health.restarts(0), health.restarts(1), health.all_restarts) == (
        0,
        1,
        1,
    )


def test_death_amid_restart_counts_and_keeps_time() -> None:
    now = [0.0]
    health = EngineHealth(1, lambda: now[0])
    health.died(0)
    health.restarting(0)
    now[0] = 3.0
    assert health.died(0)
    health.restarting(0)
    now[0] = 5.0
    assert health.loaded(0) == 5.0 and health.restarts(0) == 2
    now[0] = 6.0
    assert health.died(0), "an engine can die before it has weights"
    assert health.state(0) is EngineState.DEAD


def test_engine_retires_after_its_last_restart() -> None:
    health = EngineHealth(2)
    for _ in range(RESTARTS.most):
        health.died(0)
        assert health.state(0) is EngineState.DEAD
        health.restarting(0)
        health.loaded(0)
        health.has_weights(0)
    health.died(0)
    assert health.state(0) is EngineState.RETIRED and not health.all_retired
    assert not health.died(0)
    with pytest.raises(AssertionError, match="engine 0 is retired"):
        health.restarting(0)


@pytest.mark.parametrize(
    ("causes", "answers", "hopeless"),
    [
        (["no kernel", "no kernel"], False, {0: "no kernel"}),
        (["fault at 0x7f of process 12", "fault at 0x3a of process 9"], False, {0: "fault at 0x7f of process 12"}),
        (["killed", "no kernel", "no kernel"], False, {0: "no kernel"}),
        (["no kernel", "killed", "out of memory"], False, {}),
        (["no kernel"] * 4, True, {}),
        ([None] * 4, False, {}),
    ],
)
def test_two_like_deaths_before_any_answer_retire_it(
    causes: list[str | None], answers: bool, hopeless: dict[int, str]
) -> None:
    health = EngineHealth(2)
    if answers:
        health.answered(0)
    for cause in causes:
        health.died(0, cause)
        if health.state(0) is EngineState.DEAD:
            health.restarting(0)
            health.loaded(0)
    assert health.hopeless == hopeless
    assert health.state(0) is (EngineState.RETIRED if hopeless else EngineState.STALE)


def test_consecutive_late_requests_count_as_death() -> None:
    health = EngineHealth(1)
    late = [health.late(0) for _ in range(MOST_LATE - 1)]
    assert not any(late) and health.state(0) is EngineState.SUSPECT and health.in_states(SERVING) == [0]
    health.answered(0)
    assert health.state(0) is EngineState.HEALTHY
    assert [health.late(0) for _ in range(MOST_LATE)] == [False] * (MOST_LATE - 1) + [True]


def test_stale_engine_stays_stale_after_requests() -> None:
    health = EngineHealth(1)
    health.died(0)
    health.restarting(0)
    health.loaded(0)
    health.answered(0)
    assert health.state(0) is EngineState.STALE
    health.late(0)
    assert health.state(0) is EngineState.STALE


@pytest.mark.parametrize("seed", range(20))
def test_only_weights_let_a_restarted_engine_serve(seed: int) -> None:
    """For random sequences of events, all transitions follow the diagram in the module docstring of `engine_health`."""
    numbers, health = random.Random(seed), EngineHealth(1)
    follows = {
        EngineState.HEALTHY: {EngineState.SUSPECT, EngineState.DEAD, EngineState.RETIRED},
        EngineState.SUSPECT: {EngineState.HEALTHY, EngineState.DEAD, EngineState.RETIRED},
        EngineState.DEAD: {EngineState.RESTARTING},
        EngineState.RESTARTING: {EngineState.STALE, EngineState.DEAD, EngineState.RETIRED},
        EngineState.STALE: {EngineState.HEALTHY, EngineState.DEAD, EngineState.RETIRED},
        EngineState.RETIRED: set(),
    }
    events = [health.died, health.answered, health.late, health.has_weights]
    for _ in range(60):
        before = health.state(0)
        own = {EngineState.DEAD: [health.restarting], EngineState.RESTARTING: [health.loaded]}.get(before, [])
        numbers.choice([*events, *own])(0)
        after = health.state(0)
        assert after is before or after in follows[before], f"{before} became {after}"
        assert health.restarts(0) <= RESTARTS.most
