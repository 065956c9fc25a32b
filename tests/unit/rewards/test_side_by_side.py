"""Asynchronous rewards, rewards that compare a group, and several rewards in one process."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from roll.errors import ConfigError
from roll.types import RewardOutcome, RewardResult
from tests import limits
from tests.unit.rewards.running import LATE, PROMPT, process, reward_children, run, scored

pytestmark = pytest.mark.usefixtures("marks", "nothing_left_behind")
AWAITED = {"reward": "awaited_rewards:act", "concurrency": 4}


def said(results: list[RewardResult]) -> list[tuple[float, str, str]]:
    return [(result.value, str(result.outcome), result.note) for result in results]


def test_concurrent_results_keep_order_of_responses() -> None:
    """The first calls wait for the last one, so all of them must run at the same time."""
    responses = ["after last", "after last", "after last", "last"]
    assert [result.value for result in scored(*responses, **AWAITED)] == [10, 10, 10, 4]


@pytest.mark.parametrize("concurrency", [1, 3])
def test_concurrency_limit_bounds_simultaneous_calls(concurrency: int) -> None:
    responses = [str(number) for number in range(12)]
    results = scored(*responses, reward="awaited_rewards:most_running", concurrency=concurrency)
    assert max(result.value for result in results) == concurrency


def test_late_concurrent_call_is_cancelled_alone(marks: Path) -> None:
    async def go() -> tuple[list[RewardResult], list[int], list[int]]:
        async with process(**AWAITED, timeout=limits.EXPIRY) as rewards:
            before = reward_children()
            return await rewards.score(PROMPT, ["forever 1", "late", "forever 2"]), before, reward_children()

    results, before, after = run(go())
    late = f"no verdict after {limits.EXPIRY:g} s"
    assert said(results) == [(-1.0, "timed_out", late)] * 3
    assert before == after
    assert (marks / "cancelled forever 1").exists()
    assert (marks / "cancelled forever 2").exists()


@pytest.mark.parametrize(
    ("guilty", "outcome", "note"),
    [("block 0 1", "timed_out", LATE), ("exit 0 1", "crashed", "the process ended itself with status 3")],
)
def test_call_ending_its_process_spares_its_neighbours(guilty: str, outcome: str, note: str, marks: Path) -> None:
    """Neighbouring calls that have begun are repeated. Calls that have not begun are made as usual."""
    neighbours = ["after 0", "after 1"]

    async def go() -> list[RewardResult]:
        async with process(**AWAITED) as rewards:
            scoring = asyncio.create_task(
                rewards.score(PROMPT, [neighbours[0], guilty, neighbours[1], "fine", "unavailable"])
            )
            # Wait in a thread, because the clock of the loop, with all its deadlines, is advanced as soon as a call
            # hangs.
            await asyncio.to_thread(
                limits.until, (marks / "hanging").exists, "the faulty call blocks or ends the process", limits.CALL
            )
            for number in (0, 1):
                (marks / str(number)).touch()
            return await scoring

    hangs_end = marks if guilty.startswith("block") else None
    assert said(run(go(), hangs_end)) == [
        (7.0, "scored", ""),
        (-1.0, outcome, note),
        (7.0, "scored", ""),
        (4.0, "scored", ""),
        (-1.0, "unavailable", "nobody answers"),
    ]


def test_call_that_ignores_cancellation_is_killed(marks: Path) -> None:
    assert said(scored("ok", "swallow", "fine", hangs_end=marks, **AWAITED)) == [
        (2.0, "scored", ""),
        (-1.0, "timed_out", LATE),
        (4.0, "scored", ""),
    ]


def test_asynchronous_reward_exception_is_recorded_with_line(marks: Path) -> None:
    lines = (marks / "awaited_rewards.py").read_text().splitlines()
    line = lines.index('            raise KeyError("no such thing")') + 1
    failed, forked, fine = scored("raise", "fork", "fine", **AWAITED)
    assert failed.outcome is RewardOutcome.CRASHED
    assert failed.note.startswith("KeyError: 'no such thing' (")
    assert failed.note.endswith(f"({marks / 'awaited_rewards.py'}, line {line})")
    assert (forked.value, fine.value) == (4.0, 4.0)


def test_new_responses_start_beside_running_ones(marks: Path) -> None:
    async def go() -> list[float]:
        async with process(**AWAITED) as rewards:
            first = asyncio.create_task(rewards.score(PROMPT, ["after 0"]))
            await limits.comes_true((marks / "begun after 0").exists, "the first call has begun")
            (second,) = await rewards.score(PROMPT, ["second"])
            assert not first.done()
            (marks / "0").touch()
            return [second.value, *(result.value for result in await first)]

    assert run(go()) == [6.0, 7.0]


def test_a_cancelled_group_disturbs_none_beside_it(marks: Path) -> None:
    async def go() -> tuple[list[RewardResult], list[int], list[int]]:
        async with process(**AWAITED) as rewards:
            before = reward_children()
            cancelled, kept = (asyncio.create_task(rewards.score(PROMPT, [f"after {number}"])) for number in range(2))
            await limits.comes_true(lambda: len(list(marks.glob("begun *"))) == 2, "both calls have begun")
            cancelled.cancel()
            (marks / "1").touch()
            (marks / "0").touch()
            return await kept, before, reward_children()

    results, before, after = run(go())
    assert said(results) == [(7.0, "scored", "")]
    assert before == after


@pytest.mark.parametrize("name", ["longer_than", "longer_than_awaited"])
def test_group_reward_receives_all_responses_together(name: str) -> None:
    group = {"reward": f"awaited_rewards:{name}", "group": True}

    async def go() -> list[list[RewardResult]]:
        async with process(**group) as rewards:
            groups = [
                ["a", "ccc", "bb"],
                ["a"],
                [],
                ["mixed", "", "", ""],
                ["too few", ""],
                ["no sequence"],
                ["raise", ""],
            ]
            return await asyncio.gather(*(rewards.score(PROMPT, responses) for responses in groups))

    lengths, one, none, mixed, few, no_sequence, failed = run(go())
    assert [result.value for result in lengths] == [0.0, 2.0, 1.0]
    assert [result.value for result in one] == [0.0]
    assert none == []
    assert [str(result.outcome) for result in mixed] == ["scored", "unparsable", "crashed", "scored"]
    assert [result.value for result in mixed] == [1.0, -1.0, -1.0, 4.0]
    assert {result.note for result in few} == {"returned 1 results for 2 responses"}
    assert no_sequence[0].note.startswith("returned a float, ") and no_sequence[0].note.endswith(": 1.0")
    assert ["KeyError" in result.note for result in failed] == [True, True]


def test_the_parts_of_a_domain_share_its_process() -> None:
    parts: dict[str, Any] = {
        "length": {"reward": "awaited_rewards:act", "weight": 2.0},
        "rank": {"reward": "awaited_rewards:longer_than", "group": True, "weight": -1.0},
        "process": {"reward": "awaited_rewards:process_number", "weight": 0.0},
    }

    async def go() -> tuple[list[RewardResult], list[int]]:
        async with process(reward=None, parts=parts, concurrency=2) as rewards:
            return await rewards.score(PROMPT, ["a", "bbb", "unavailable"]), reward_children()

    (first, second, third), (child,) = run(go())
    assert first == RewardResult(2.0, parts={"length": 1.0, "rank": 0.0, "process": float(child)})
    assert second == RewardResult(5.0, parts={"length": 3.0, "rank": 1.0, "process": float(child)})
    assert (third.outcome, third.note) == (RewardOutcome.UNAVAILABLE, "length: nobody answers")


def test_concurrency_of_plain_function_is_refused() -> None:
    async def go() -> None:
        async with process(reward="awaited_rewards:process_number", concurrency=2):
            pytest.fail("the reward process started")

    with pytest.raises(
        ConfigError, match=r"rewards\.act\.concurrency: 2, .*awaited_rewards:process_number .*plain function"
    ):
        run(go())


@pytest.mark.parametrize(
    ("settings", "function"),
    [(AWAITED, "act"), ({"reward": "awaited_rewards:longer_than", "group": True}, "longer_than")],
)
def test_awaited_and_group_rewards_keep_their_traces(settings: dict[str, Any], function: str, marks: Path) -> None:
    failed = scored("raise", **settings)[0]
    first, line, last = failed.trace.splitlines()
    assert first.startswith(f'  File "{marks / "awaited_rewards.py"}", line ') and first.endswith(f", in {function}")
    assert line.strip() == 'raise KeyError("no such thing")'
    assert last == "KeyError: 'no such thing'"
