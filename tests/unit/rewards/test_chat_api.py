"""A judge behind an API: the protocol, failures and retries."""

from __future__ import annotations

import asyncio
import json
import socket
from dataclasses import replace
from datetime import UTC, datetime
from random import Random
from typing import Any

import pytest

from roll.rewards.judges.chat_api import (
    FIRST_WAIT,
    LONGEST_WAIT,
    ApiChat,
    ApiModel,
    Refusal,
    parse_chat_response,
    wait_seconds,
)
from roll.rewards.judges.judge import JudgeReply
from roll.types import Sampling
from tests import limits
from tests.unit.rewards.chat_server import Behaviour, ChatServer, Response, chat_server, completion, error

MODEL = ApiModel(
    "", "a-judge", "hush", Sampling(64, temperature=0.0), limits.CALL, retries=3, concurrency=4, max_calls=None, seed=5
)


class Naps:
    """Stands in for `asyncio.sleep`, and records the durations."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    async def __call__(self, seconds: float) -> None:
        self.seconds.append(seconds)


def asked(
    behaviour: Behaviour, *messages: str, model: ApiModel = MODEL
) -> tuple[list[JudgeReply], ChatServer, list[float]]:
    """Send messages concurrently. Return the replies, the requests that the server received, and the waits between
    attempts.
    """

    async def run() -> tuple[list[JudgeReply], ChatServer, list[float]]:
        async with chat_server(behaviour) as server:
            naps = Naps()
            chat = ApiChat(replace(model, url=server.url), naps)
            try:
                return await asyncio.gather(*map(chat.ask, messages)), server, naps.seconds
            finally:
                await chat.close()

    return asyncio.run(run())


def echo(body: dict[str, Any], number: int) -> Response:
    return completion(f"echo {body['messages'][0]['content']}")


def test_speaks_the_protocol() -> None:
    (reply,), server, naps = asked(echo, "is it so?")
    assert reply == JudgeReply(("echo is it so?",), 7, 3)
    assert server.bodies == [
        {
            "model": "a-judge",
            "messages": [{"role": "user", "content": "is it so?"}],
            "max_tokens": 64,
            "temperature": 0.0,
        }
    ]
    assert server.headers[0]["authorization"] == "Bearer hush"
    assert naps == []


def test_sends_what_changes_the_sampling() -> None:
    sampling = Sampling(8, samples=2, temperature=0.7, top_p=0.9, top_k=5, repetition_penalty=1.1, stop=("\n",))
    (reply,), server, _ = asked(
        lambda body, number: completion("a", "b"), "x", model=replace(MODEL, sampling=sampling, key=None)
    )
    assert reply.answers == ("a", "b")
    assert (
        server.bodies[0] | {"n": 2, "top_p": 0.9, "top_k": 5, "repetition_penalty": 1.1, "stop": ["\n"]}
        == server.bodies[0]
    )
    assert "authorization" not in server.headers[0]


def test_the_key_is_not_shown() -> None:
    assert "hush" not in repr(MODEL)


def test_no_more_requests_than_allowed_at_a_time() -> None:
    replies, server, _ = asked(echo, *map(str, range(40)))
    assert [reply.answers for reply in replies] == [(f"echo {number}",) for number in range(40)]
    assert 2 <= server.most_open <= MODEL.concurrency


FAILS_IN_PASSING = {
    "500": error(500, "try later"),
    "503 without a body": Response(503),
    "garbage": Response(body=b"<html>not json"),
    "JSON of something else": Response(body=json.dumps({"choices": [{"text": "old protocol"}]}).encode()),
    "no choice": Response(body=json.dumps({"choices": []}).encode()),
    "cut off": replace(completion("half"), cut=True),
}


@pytest.mark.parametrize("failure", FAILS_IN_PASSING)
def test_asks_again_after_what_may_pass(failure: str) -> None:
    def behaviour(body: dict[str, Any], number: int) -> Response:
        return FAILS_IN_PASSING[failure] if number < 2 else completion("at last")

    (reply,), server, naps = asked(behaviour, "x")
    assert reply.answers == ("at last",)
    assert len(server.bodies) == 3 and len(naps) == 2


def test_gives_up_after_the_last_attempt() -> None:
    (reply,), server, naps = asked(lambda body, number: error(500, "out of order"), "x")
    assert reply.answers == () and "status 500: 'out of order'" in reply.failure and "(attempt 4)" in reply.failure
    assert len(server.bodies) == 4 and len(naps) == 3


@pytest.mark.parametrize("status", [400, 401, 403, 404])
def test_does_not_repeat_what_cannot_succeed(status: int) -> None:
    (reply,), server, _ = asked(lambda body, number: error(status, "no such model"), "x")
    assert f"status {status}: 'no such model'" in reply.failure and "hush" not in reply.failure
    assert len(server.bodies) == 1


def test_chat_client_waits_as_server_requests() -> None:
    def behaviour(body: dict[str, Any], number: int) -> Response:
        return error(429, "slow down", **{"Retry-After": "17"}) if number == 0 else completion("yes")

    (reply,), _, naps = asked(behaviour, "x")
    assert reply.answers == ("yes",) and naps == [17.0]


def test_a_hanging_request_ends_at_its_deadline() -> None:
    def behaviour(body: dict[str, Any], number: int) -> Response:
        return Response(hangs=True) if number == 0 else completion("awake")

    (reply,), server, _ = asked(behaviour, "x", model=replace(MODEL, seconds=limits.EXPIRY, retries=0))
    assert reply.failure.endswith(f"no response within {limits.EXPIRY:g} s") and len(server.bodies) == 1


def test_nobody_listens() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound but not listening, so connections are refused
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/v1"

        async def run() -> JudgeReply:
            chat = ApiChat(replace(MODEL, url=url), Naps())
            try:
                return await chat.ask("x")
            finally:
                await chat.close()

        reply = asyncio.run(run())
    assert reply.answers == () and "ConnectError" in reply.failure


def test_calls_are_bounded_and_that_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    def behaviour(body: dict[str, Any], number: int) -> Response:
        return error(500, "hm") if number == 0 else completion("yes")

    replies, server, _ = asked(behaviour, *"abcdef", model=replace(MODEL, max_calls=3, concurrency=1))
    assert [bool(reply.answers) for reply in replies] == [True, True, False, False, False, False]
    assert len(server.bodies) == 3, "a retry counts as a call"
    [said] = (record.getMessage() for record in caplog.records if record.name.startswith("roll"))
    assert said.startswith("no verdict: judge_max_calls (3) ")


@pytest.mark.parametrize(
    "url", ["http://h/v1", "http://h/v1/", "http://h/v1/chat/completions", "http://h/v1/chat/completions/"]
)
def test_takes_the_base_and_the_whole_address(url: str) -> None:
    assert replace(MODEL, url=url).address == "http://h/v1/chat/completions"


def test_waits_double_and_are_jittered() -> None:
    waits = [wait_seconds(attempt, None, Random(0)) for attempt in range(1, 40)]
    for attempt, wait in enumerate(waits, 1):
        whole = min(LONGEST_WAIT, FIRST_WAIT * 2 ** (attempt - 1))
        assert whole / 2 <= wait <= whole
    assert waits == [wait_seconds(attempt, None, Random(0)) for attempt in range(1, 40)]
    assert len({wait_seconds(3, None, Random(seed)) for seed in range(10)}) == 10
    assert wait_seconds(1, 10 * LONGEST_WAIT, Random(0)) == LONGEST_WAIT


def test_a_date_says_when_to_come_back() -> None:
    now = datetime(2015, 10, 21, 7, 27, 48, tzinfo=UTC)
    headers = {"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"}
    assert parse_chat_response(429, headers, b"", now) == Refusal("status 429: ''", again=True, after=12.0)
    assert parse_chat_response(429, {"retry-after": "soon"}, b"", now) == Refusal(
        "status 429: ''", again=True, after=None
    )


@pytest.mark.parametrize(
    "body",
    [
        b'{"choices": [{"message": {"content": "8"}}], "usage": {"prompt_tokens": Infinity}}',
        b'{"choices": ' + b"[" * 100_000,
        b'{"choices": [{"text": "8"}]}',
        b"[]",
    ],
    ids=["infinite", "nested", "another protocol", "a list"],
)
def test_an_unreadable_answer_is_requested_again(body: bytes) -> None:
    found = parse_chat_response(200, {}, body)
    assert isinstance(found, Refusal) and found.again and "chat completion" in found.why


def test_reads_answers_in_parts_and_without_text() -> None:
    parts = [{"type": "text", "text": "Score: "}, {"type": "image"}, {"type": "text", "text": "8"}]
    body = {"choices": [{"message": {"content": parts}}, {"message": {"content": None}}]}
    assert parse_chat_response(200, {}, json.dumps(body).encode()) == JudgeReply(("Score: 8", ""), 0, 0)
