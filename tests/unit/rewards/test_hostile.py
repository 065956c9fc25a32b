"""Rewards that write to the socket of their process, replace judging code, or exceed their limits."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from roll.errors import Fault
from roll.hosted.protocol import HEADER, MOST_BYTES, Garbled, Reply, read_ready, read_reply, ready_message
from roll.hosted.raised import TRACE_CHARACTERS
from roll.rewards.verdicts import MOST_NOTE, MOST_PARTS, answer_message, checked_result, read_results, read_traits
from roll.types import RewardOutcome, RewardResult, TurnReward
from tests import limits
from tests.unit.rewards.running import PROMPT, process, reward_children, run, scored

pytestmark = pytest.mark.usefixtures("hostile", "nothing_left_behind")
ACT = "hostile_rewards:act"
MIB = 1 << 20


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of the module `hostile_rewards`."""
    (tmp_path / "hostile_rewards.py").write_text(Path(__file__).with_name("hostile.py").read_text())
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


FORGERIES = {
    "a pickle": "bytes that are not a valid message",
    "guessed seals": "it does not carry the number of a call in progress",
    "an endless message": f"a message of {1 << 62} bytes, but at most {MOST_BYTES} are allowed",
    "nested brackets": "200000 bytes that are not a valid message",
    "no number": "a verdict is malformed: number",
    "too large": "a verdict is malformed: number",
    "no result": "a verdict is malformed",
    "no text": "200 bytes that are not a valid message",
}
REPLACED = ["own function", "own code", "own method", "own class", "deleted", "builtin for others"]


def between_others(responses: Iterable[str]) -> list[str]:
    """Return the responses with a harmless one before and after each."""
    return ["ok", *(one for response in responses for one in (response, "ok"))]


def test_forged_verdict_is_neither_executed_nor_accepted(hostile: Path) -> None:
    results = scored(*between_others(FORGERIES), reward=ACT)
    assert [result.value for result in results[::2]] == [2.0] * (len(FORGERIES) + 1)
    for failed, why in zip(results[1::2], FORGERIES.values(), strict=True):
        assert (failed.value, failed.outcome) == (-1.0, RewardOutcome.CRASHED)
        assert "invalid verdict: " in failed.note and why in failed.note
    assert not (hostile / "ran").exists()


def test_a_verdict_counts_once() -> None:
    """A verdict that the reward writes with the seal of its own call counts for this call. A second verdict belongs to
    no call.
    """
    before, forged, after = scored("ok", "one too many", "ok", reward=ACT)
    assert (before.value, forged.value) == (2.0, 1.0)
    assert after.outcome is RewardOutcome.CRASHED or after.value == 2.0


def test_forging_beside_others_costs_only_the_forger(hostile: Path) -> None:
    results = scored("ok", "a pickle", "ok", "guessed seals", "ok", reward="hostile_rewards:act_beside", concurrency=3)
    assert [result.value for result in results] == [2.0, -1.0, 2.0, -1.0, 2.0]
    assert not (hostile / "ran").exists()


@pytest.mark.parametrize("reward", ["hostile_rewards:act", "hostile_rewards:act_beside"])
def test_replaced_builtins_do_not_reach_next_response(reward: str, caplog: pytest.LogCaptureFixture) -> None:
    results = scored(*between_others(["own function", *REPLACED]), reward=reward)
    assert [result.value for result in results] == [2.0, *[5.0, 2.0] * (len(REPLACED) + 1)]
    assert len(caplog.messages) == len(set(caplog.messages)) == 4  # each replaced name is reported once
    assert all(message.startswith("rewards.act: a reward function replaced ") for message in caplog.messages)


@pytest.mark.parametrize("reward", ["hostile_rewards:act", "hostile_rewards:act_beside"])
def test_reward_breaking_its_process_spares_other_calls(reward: str) -> None:
    results = scored("ok", "builtin", "ok", reward=reward)
    assert [result.value for result in results] == [2.0, -1.0, 2.0]


def test_what_a_reward_keeps_stays(hostile: Path) -> None:
    """A reward may keep a cache, or a model that the first call loads. Its process is not replaced."""
    source = (
        "LOADED = None\ndef act(prompt, response, row):\n    global LOADED\n    LOADED = (LOADED or 0) + 1\n    "
        "return LOADED\n"
    )
    (hostile / "keeping_rewards.py").write_text(source)

    async def go() -> tuple[list[RewardResult], bool]:
        async with process(reward="keeping_rewards:act") as rewards:
            before = reward_children()
            return await rewards.score(PROMPT, ["a", "b", "c"]), before == reward_children()

    results, same = run(go())
    assert [result.value for result in results] == [1.0, 2.0, 3.0]
    assert same


@pytest.mark.parametrize(
    ("response", "note"),
    [
        (f"allocate {1 << 40}", "MemoryError"),
        (f"share 3 {300 * MIB}", "the process and its descendants held "),
        ("start 9", "the process and its descendants were "),
    ],
)
def test_what_a_reward_takes_is_bounded(response: str, note: str) -> None:
    before, failed, after = scored("ok", response, "ok", memory_gib=0.75, max_processes=8, reward=ACT)
    assert (before.value, after.value) == (2.0, 2.0)
    assert failed.outcome is RewardOutcome.CRASHED
    assert failed.note.startswith(note)
    assert "memory_gib" in failed.note or "max_processes is 8" in failed.note


def test_processes_left_behind_by_calls_are_bounded() -> None:
    """Processes are also counted while nothing is scored."""

    async def go() -> None:
        async with process(max_processes=2, reward="hostile_rewards:act", timeout=limits.EXPIRY) as rewards:
            (before,) = reward_children()
            scoring = asyncio.create_task(rewards.score(PROMPT, ["start 4"]))
            await limits.comes_true(lambda: before not in reward_children(), "the reward process was ended")
            await scoring

    run(go())


@pytest.mark.parametrize(
    ("returned", "note"),
    [
        (10**400, "returned an integer that is too large for a float"),
        (float("nan"), "returned nan, which is not finite"),
        (1e39, "returned 1e+39, which is too large for fp32"),
        (
            RewardResult(10**400),
            "returned a malformed RewardResult: its value is an integer that is too large for a float",
        ),
        (
            RewardResult(1.0, parts={str(number): 0.0 for number in range(MOST_PARTS + 1)}),
            "returned a malformed RewardResult: it has 65 parts",
        ),
        (RewardResult(1.0, parts={"x" * 101: 0.0}), "returned a malformed RewardResult: it has 1 parts"),
        (
            RewardResult(1.0, parts={"a": -1e39}),
            "returned a malformed RewardResult: its part 'a' is -1e+39, which is too large for fp32",
        ),
    ],
)
def test_a_value_beyond_bounds_is_no_verdict(returned: Any, note: str) -> None:
    result = checked_result(returned, "response")
    assert result.outcome is RewardOutcome.CRASHED
    assert result.note.startswith(note)


def test_a_long_note_is_cut() -> None:
    assert checked_result(RewardResult(1.0, note="x" * 10 * MIB), "").note == "x" * MOST_NOTE


def test_an_answer_travels_whole() -> None:
    results = [
        RewardResult(0.1, RewardOutcome.UNPARSABLE, {"\ud800": 1e-300}, "\x00ä\udc80", ()),
        RewardResult(-0.0, turns=(TurnReward(1, 0.5), TurnReward(4, -1.0))),
        RewardResult(0.0, RewardOutcome.CRASHED, note="KeyError", trace="  File 'x'\n\udc80"),
    ]
    answer = read_reply(answer_message(7, (1 << 64) - 1, results, "module.name")[8:])
    assert (answer.number, answer.seal) == (7, (1 << 64) - 1)
    received, rest = read_results(answer, ["", "four", ""])
    assert rest == "module.name" and received[1] == results[1]
    assert received[0] == replace(results[0], parts={"\ufffd": 1e-300}, note="\x00ä\ufffd")
    assert received[2] == replace(results[2], trace="  File 'x'\n\ufffd")


@pytest.mark.parametrize(
    "one",
    [
        ["1.0", "scored", {}, "", []],
        [True, "scored", {}, "", []],
        [1.0, "won", {}, "", []],
        [1.0, ["scored"], {}, "", []],
        [1.0, "scored", [], "", []],
        [1.0, "scored", {"a": "b"}, "", []],
        [1.0, "scored", {}, "x" * (MOST_NOTE + 1), []],
        [1.0, "scored", {}, None, []],
        [1.0, "crashed", {}, "", [], None, "x" * (TRACE_CHARACTERS + 1)],
        [1.0, "crashed", {}, "", [], None, None],
        [1.0, "scored", {}, "", [[9, 1.0]]],
        [1.0, "scored", {}, "", [[2, 1.0], [2, 1.0]]],
        [1.0, "scored", {}, "", [[1.5, 1.0]]],
        [1.0, "scored", {}, "", 3],
        [1.0, "scored"],
        "scored",
        None,
    ],
)
def test_a_verdict_is_looked_at_piece_by_piece(one: Any) -> None:
    with pytest.raises(Garbled):
        read_results(Reply(7, 8, [one], ""), ["response"])


def test_replaced_definition_is_a_text() -> None:
    with pytest.raises(Garbled):
        read_results(Reply(7, 8, [], 3), [])


@pytest.mark.parametrize(
    "body", [b"", b"{}", b"[]", b"[1, 2, 3, 4]", b"[1, 2, [], 3]", b"[" * 100000, b"9" * 5000, b"\x80\x04N."]
)
def test_what_is_no_message_is_garbled(body: bytes) -> None:
    for read in (lambda body: read_results(read_reply(body), []), lambda body: read_ready(body, lambda _: None)):
        with pytest.raises(Garbled):
            read(body)


def test_ready_message_must_describe_all_parts() -> None:
    with pytest.raises(Garbled):
        read_ready(json.dumps([[], [[True, False, 1.0, ""]], True]).encode(), lambda traits: read_traits(traits, 2))


@pytest.mark.parametrize("fault", [["a", "b", "c"], ["a", "b", "c", "no_code"], ["a", "b", 3, "unfit"], "abcd", 4])
def test_fault_of_a_child_has_a_known_code(fault: Any) -> None:
    with pytest.raises(Garbled):
        read_ready(json.dumps([[fault], None, False]).encode(), lambda traits: traits)
    sound = Fault("rewards.sums", "broken", "fix it", "failed")
    assert read_ready(ready_message([sound])[HEADER.size :], lambda traits: traits).faults == (sound,)
