"""Text from outside is made such that UTF-8 can express it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.agents.environments.base import Observation, Step
from roll.agents.environments.checked import Call, Method, outcome_of, returned_message
from roll.errors import Fault
from roll.hosted.protocol import HEADER, read_ready, read_reply, ready_message
from roll.rewards.judges.chat_api import parse_chat_response
from roll.rewards.judges.judge import JudgeReply
from roll.rewards.verdicts import answer_message, read_results
from roll.system.text import clean_text, cleaned
from roll.types import RewardResult

HALF = "cut: \ud83d"
ANY = st.characters(exclude_categories=())


@pytest.mark.parametrize(
    ("text", "clean"),
    [("\ud83d", "\ufffd"), ("a\udc00b", "a\ufffdb"), ("\ud83d\ude00", "\U0001f600"), ("\0 é", "\0 é"), ("", "")],
)
def test_only_halves_of_surrogate_pairs_are_replaced(text: str, clean: str) -> None:
    assert clean_text(text) == clean


@given(
    st.recursive(st.text(ANY) | st.integers() | st.none(), lambda of: st.lists(of) | st.dictionaries(st.text(ANY), of))
)
def test_every_json_value_becomes_utf8(value: Any) -> None:
    found = json.dumps(cleaned(value), ensure_ascii=False).encode()
    assert cleaned(json.loads(found)) == cleaned(value)


def test_replies_of_user_code_are_clean() -> None:
    tool = {"type": "function", "function": {"name": HALF, "parameters": {HALF: 1}}}
    seen = Observation([{"role": "user", "content": HALF}], [tool], HALF)
    answers: tuple[tuple[Method, Observation | Step], ...] = (
        ("reset", seen),
        ("step", Step(seen.messages, metrics={HALF: 1.0}, state=HALF)),
    )
    for method, returned in answers:
        sent = returned_message(Call(1, 2, 3, method, ()), returned)[HEADER.size :]
        assert "\ufffd" in str(outcome_of(method, read_reply(sent)))
    sent = answer_message(1, 2, [RewardResult(1.0, note=HALF, parts={HALF: 1.0}, trace=HALF)], HALF)[HEADER.size :]
    assert "\ufffd" in str(read_results(read_reply(sent), [""]))
    fault = Fault(HALF, HALF, HALF, "failed")
    assert "\ufffd" in str(read_ready(ready_message([fault])[HEADER.size :], lambda _: None))


def test_answers_of_an_api_are_clean() -> None:
    body = {"choices": [{"message": {"content": HALF}}]}
    assert parse_chat_response(200, {}, json.dumps(body).encode()) == JudgeReply(("cut: \ufffd",))
