"""Samples go to the engine with the most room, and no engine gets more than its limit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.backend import EngineActivity
from roll.engines.pool import LOWERED, SPARE, Running, RunningLimit, running_limits


def activity(preemptions: int | None, use: float | None) -> EngineActivity:
    return EngineActivity(1.0, 10, 10, preemptions=preemptions, kv_cache_use=use)


def test_limits_of_engines() -> None:
    shares = running_limits(3, 8, 512)
    assert shares and [limit.samples for limit in shares] == [3, 3, 2]
    own = running_limits(2, None, 512)
    assert own and [limit.samples for limit in own] == [512, 512]
    assert running_limits(2, None, None) is None


def test_samples_of_prompt_stay_together_if_possible() -> None:
    running = Running(running_limits(2, 8, None), 2)
    assert running.place(3) == (0, 3)
    assert running.place(3) == (1, 3), "the engine with more free places"
    assert running.place(3) == (0, 1) and running.place(2) == (1, 1)
    assert running.place(1)[1] == 0, "both engines are full"
    running.leave(1, 2)
    assert running.place(5) == (1, 2)


def test_a_turn_goes_where_the_one_before_went() -> None:
    running = Running(running_limits(2, 4, None), 2)
    assert running.place(1) == (0, 1)
    assert running.place(1, home=0) == (0, 1), "although the other engine is less busy"
    assert running.place(1, home=0) == (1, 1), "the home engine is full"
    running.leave(0, 2)
    running.serve([0, 1], suspect=[0])
    assert running.place(1, home=0) == (1, 1), "the home engine is suspect"
    running.serve([1], suspect=[])
    running.leave(1, 2)
    assert running.place(1, home=0) == (1, 1), "the home engine is dead"


def test_without_limits_the_least_busy_engine_takes_all() -> None:
    running = Running(None, 2)
    assert [running.place(4), running.place(4), running.place(100)] == [(0, 4), (1, 4), (0, 100)]
    running.leave(0, 104)
    assert running.place(1) == (0, 1) and running.limit is None


@given(most=st.integers(2, 40), engines=st.integers(1, 4), events=st.lists(st.integers(1, 9), max_size=60))
def test_engines_neither_exceed_shares_nor_idle(most: int, engines: int, events: list[int]) -> None:
    shares = [limit.samples for limit in running_limits(engines, max(most, engines), None) or ()]
    running, has, waiting = Running(running_limits(engines, max(most, engines), None), engines), [0] * engines, 0
    for event in events:
        waiting += event
        while waiting and (placed := running.place(waiting))[1]:
            has[placed[0]] += placed[1]
            waiting -= placed[1]
        assert all(count <= share for count, share in zip(has, shares, strict=True))
        assert not waiting or has == shares
        busiest = has.index(max(has))
        running.leave(busiest, gone := min(event, has[busiest]))
        has[busiest] -= gone


@pytest.mark.parametrize(
    ("preemptions", "use", "most_running", "after"),
    [
        (3, 0.97, 100, 80),  # the KV cache was full
        (3, 0.97, 50, 40),  # the KV cache was full with fewer samples than the limit
        (3, 0.5, 100, 100),  # samples were preempted for a weight sync, and not for lack of room
        (0, 0.97, 100, 100),  # the KV cache was full, but nothing was preempted
        (None, None, 100, 100),  # the backend does not report preemptions
    ],
)
def test_a_limit_heeds_a_full_cache(preemptions: int | None, use: float | None, most_running: int, after: int) -> None:
    limit = RunningLimit(100, adapts=True)
    limit.adapt(activity(preemptions, use), most_running)
    assert limit.samples == after


def test_limit_rises_with_room_up_to_maximum() -> None:
    limit = RunningLimit(100, adapts=True)
    limit.adapt(activity(1, 1.0), 100)
    limit.adapt(activity(0, SPARE / 2), 79)
    assert limit.samples == 100 * LOWERED, "fewer samples ran than the limit allows, which proves nothing"
    limit.adapt(activity(0, SPARE / 2), 80)
    assert limit.samples == 100
    limit.adapt(activity(0, SPARE / 2), 100)
    assert limit.samples == 100


def test_a_limit_that_was_given_stays() -> None:
    limit = RunningLimit(100, adapts=False)
    limit.adapt(activity(9, 1.0), 100)
    assert limit.samples == 100


def test_a_limit_leaves_one() -> None:
    limit = RunningLimit(1, adapts=True)
    limit.adapt(activity(9, 1.0), 1)
    assert limit.samples == 1


def test_most_room_wins_among_unequal_limits() -> None:
    running = Running([RunningLimit(4, adapts=True), RunningLimit(8, adapts=True)], 2)
    assert running.place(3) == (1, 3)
    running.serve([0, 1], suspect=[1])
    assert running.place(3) == (0, 3), "a suspect engine has room for as many, and is not chosen"
    assert running.place(3) == (1, 3), "only the suspect engine has room for all"
    running.serve([0], ())
    assert running.place(3) == (0, 1) and running.can_serve
    running.serve([], ())
    assert running.place(1) == (0, 0) and not running.can_serve
