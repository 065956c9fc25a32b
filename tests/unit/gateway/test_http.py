"""The gateway's HTTP interface, tested with OpenAI's own client and with curl."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from roll.agents.gateway.server import Gateway, GatewayBounds
from roll.agents.gateway.session import AgentSession, SessionBounds
from roll.data.renderers.families import chat_renderer
from roll.errors import ConfigError, RollError
from roll.models.load import load_tokenizer
from roll.types import Sampling, StopReason
from tests import limits
from tests.unit.gateway.asking import ask, check_exact, laid, record, session, turns
from tests.unit.gateway.serving import BODY_BYTES, LOOPBACK, Served, run, served
from tests.unit.rollout.playing import Engine

ADD: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds one.",
        "parameters": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
    },
}
USER: Any = {"role": "user", "content": "go"}


def scripted(*texts: str) -> Engine:
    """Return an engine that answers with these texts in order, without delay."""
    left = iter(texts)
    return Engine(lambda _: next(left), takes=0)


def quick() -> Engine:
    return Engine(turns(), takes=0)


async def agent(one: Served, stream: bool) -> list[Any]:
    """Run the usual agent loop: execute the policy's tool calls until it makes none."""
    messages: list[Any] = [USER]
    while True:
        message = await (_streamed if stream else _whole)(one, messages)
        messages.append(message)
        if not message.get("tool_calls"):
            return messages
        for call in message["tool_calls"]:
            added = int(json.loads(call["function"]["arguments"])["text"]) + 1
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": str(added)})


async def _whole(one: Served, messages: list[Any]) -> dict[str, Any]:
    answer = await one.client.chat.completions.create(model="mine", messages=messages, tools=[ADD], temperature=0)
    [choice] = answer.choices
    assert answer.model == "mine" and choice.finish_reason == ("tool_calls" if choice.message.tool_calls else "stop")
    return choice.message.model_dump(exclude_none=True)


async def _streamed(one: Served, messages: list[Any]) -> dict[str, Any]:
    async with one.client.chat.completions.stream(
        model="mine", messages=messages, tools=[ADD], stream_options={"include_usage": True}
    ) as stream:
        async for _ in stream:
            pass
        answer = await stream.get_final_completion()
    assert answer.usage is not None and answer.usage.completion_tokens > 0
    return answer.choices[0].message.model_dump(exclude_none=True, exclude={"parsed": True})


@pytest.mark.parametrize("stream", [False, True])
def test_openai_client_conversation_is_one_trajectory(stream: bool) -> None:
    async def work() -> None:
        async with served(scripted("!add(1) !add(41)", "!add(42)", "done")) as one:
            messages = await agent(one, stream)
            assert [message["content"] for message in messages if message["role"] == "tool"] == ["2", "42", "43"]
            assert messages[-1]["content"] == "done"
            episode = record(one.session)
            assert laid(episode) == [
                [
                    *("user:go|assistant:", "!add(1) !add(41)|", "tool:2|tool:42|assistant:", "!add(42)|"),
                    *("tool:43|assistant:", "done|"),
                ]
            ]
            check_exact(episode, one.engine)

    run(work())


def test_usage_is_what_the_engine_saw() -> None:
    async def work() -> None:
        async with served(quick()) as one:
            answer = await one.client.chat.completions.create(model="m", messages=[USER])
            assert answer.usage is not None
            assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (
                18,
                7,
                25,
            )
            assert answer.choices[0].message.content == "turn 1"
            assert [model.id async for model in one.client.models.list()] == ["policy"]

    run(work())


def test_client_retry_after_timeout_gets_the_same_answer() -> None:
    """The client hangs up after `limits.EXPIRY` and retries automatically; the policy is sampled once for all
    attempts.
    """

    async def work() -> None:
        async with served(Engine(turns(), takes=2 * limits.EXPIRY)) as one:
            patient = one.client.with_options(timeout=limits.EXPIRY, max_retries=100)
            answer = await patient.chat.completions.create(model="m", messages=[USER])
            again = await one.client.chat.completions.create(model="m", messages=[USER])
            assert answer.choices[0].message.content == "turn 1" and answer.id == again.id
            assert len(one.engine.requests) == 1
            other = await one.client.chat.completions.create(model="m", messages=[USER], seed=1)
            assert other.id != again.id and len(one.engine.requests) == 2
            assert len(record(one.session).trajectories) == 2

    run(work())


def test_a_stream_that_waits_shows_signs_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roll.agents.gateway.server.KEEP_ALIVE_SECONDS", limits.LOOK)

    async def work() -> None:
        async with (
            served(Engine(turns(), takes=10 * limits.LOOK)) as one,
            httpx.AsyncClient(timeout=limits.CALL) as client,
        ):
            body = {"messages": [USER], "stream": True}
            answer = await client.post(f"{one.gateway.base_url}/chat/completions", json=body, headers=bearer(one.key))
            lines = answer.text.split("\n\n")
            assert lines[0] == ": waiting" and lines[-2] == "data: [DONE]"
            stream = await one.client.chat.completions.create(
                model="m", messages=[USER, {"role": "user", "content": "x"}], stream=True
            )
            said = [chunk.choices[0].delta.content async for chunk in stream]
            assert "".join(part or "" for part in said) == "turn 1"

    run(work())


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize("path", ["chat/completions", "responses", "models"])
def test_request_without_key_of_open_session_is_refused(path: str) -> None:
    async def work() -> None:
        engine = quick()
        async with served(engine) as one, httpx.AsyncClient(timeout=limits.CALL) as client:
            url = f"{one.gateway.base_url}/{path}"
            ask: Callable[..., Any] = client.get if path == "models" else client.post
            other = session(engine)
            async with one.gateway.serving(other) as ended:
                pass
            for headers in ({}, bearer("sk-unknown"), bearer(ended), {"Authorization": one.key}, {"api-key": one.key}):
                answer = await ask(url, headers=headers)
                assert answer.status_code == 401 and answer.json()["error"]["type"] == "authentication_error"
            with pytest.raises(openai.AuthenticationError):
                await one.client.with_options(api_key="wrong").models.list()
        assert not engine.requests

    run(work())


async def curl(url: str, key: str, body: str, *more: str) -> tuple[int, str]:
    given = (
        "-sS",
        "-w",
        "\n%{http_code}",
        "-H",
        f"Authorization: Bearer {key}",
        "-H",
        "Content-Type: application/json",
        *more,
    )
    process = await asyncio.create_subprocess_exec("curl", *given, "-d", "@-", url, stdin=-1, stdout=-1)
    out, _ = await asyncio.wait_for(process.communicate(body.encode()), limits.CALL)
    text, _, status = out.decode().rpartition("\n")
    return int(status), text


def test_plain_curl() -> None:
    async def work() -> None:
        async with served(quick()) as one:
            url = f"{one.gateway.base_url}/chat/completions"
            status, text = await curl(url, one.key, json.dumps({"messages": [USER]}))
            assert status == 200 and json.loads(text)["choices"][0]["message"]["content"] == "turn 1"
            status, text = await curl(url, one.key, json.dumps({"messages": [USER], "stream": True}), "-N")
            events = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
            assert (
                status == 200
                and events[-1] == "[DONE]"
                and json.loads(events[1])["choices"][0]["delta"] == {"content": "turn 1"}
            )
            status, text = await curl(url, "unknown", "{}")
            assert status == 401
            status, text = await curl(
                url, one.key, json.dumps({"messages": [{"role": "user", "content": "x" * BODY_BYTES}]})
            )
            assert status == 413 and "gateway.body_mib" in json.loads(text)["error"]["message"]
            status, text = await curl(url.replace("chat/", ""), one.key, "{}")
            assert status == 404 and "/v1/chat/completions" in json.loads(text)["error"]["message"]
            assert len(one.engine.requests) == 1

    run(work())


IMAGE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}
CALLING = {
    "role": "assistant",
    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "add", "arguments": "[1]"}}],
}


@pytest.mark.parametrize(
    ("changed", "place", "remedy"),
    [
        ({"n": 2}, "n", "send one request for each answer"),
        ({"logprobs": True}, "logprobs", "leave it out"),
        ({"top_logprobs": 3}, "top_logprobs", "leave it out"),
        ({"tool_choice": "required"}, "tool_choice", "'auto'"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls", "leave it out"),
        ({"response_format": {"type": "json_object"}}, "response_format", "ask for the format in a message"),
        ({"functions": []}, "functions", "leave it out"),
        ({"messages": None}, "messages", "at least one"),
        ({"messages": "go"}, "messages", "give a list"),
        ({"messages": [{"role": "robot", "content": ""}]}, "messages[0].role", "system, developer"),
        ({"messages": [USER, IMAGE]}, "messages[1].content[0]", "send text only"),
        ({"messages": [USER, {"role": "assistant", "content": "x"}]}, "messages", "end with a message"),
        (
            {"messages": [USER, CALLING, USER]},
            "messages[1].tool_calls[0].function.arguments",
            "send calls back unchanged",
        ),
        (
            {"messages": [USER, {"role": "tool", "content": "x"}]},
            "messages[1].tool_call_id",
            "the id of the call that the message answers",
        ),
        ({"tools": [{"type": "web_search"}]}, "tools[0]", '"type": "function"'),
        ({"max_tokens": 0}, "max_tokens", "above 0"),
        ({"max_completion_tokens": "8"}, "max_completion_tokens", "above 0"),
        ({"stop": [""]}, "stop", "non-empty strings"),
        ({"stream": "yes"}, "stream", "true or false"),
    ],
)
def test_unsupported_parameter_is_refused_with_place_and_remedy(
    changed: Mapping[str, Any], place: str, remedy: str
) -> None:
    async def work() -> None:
        async with served(quick()) as one, httpx.AsyncClient(timeout=limits.CALL) as client:
            body = {"messages": [USER], **changed}
            answer = await client.post(f"{one.gateway.base_url}/chat/completions", json=body, headers=bearer(one.key))
            error = answer.json()["error"]
            assert answer.status_code == 400 and error["param"] == place and remedy in error["message"], error
            assert not one.engine.requests

    run(work())


@pytest.mark.parametrize("body", ["", "{", "[]", '"go"', "[" * 100_000])
def test_a_body_that_is_no_object_is_refused(body: str) -> None:
    async def work() -> None:
        async with served(quick()) as one, httpx.AsyncClient(timeout=limits.CALL) as client:
            answer = await client.post(
                f"{one.gateway.base_url}/chat/completions", content=body, headers=bearer(one.key)
            )
            assert (
                answer.status_code == (413 if len(body) > BODY_BYTES else 400)
                and answer.json()["error"]["param"] == "body"
            )

    run(work())


def test_request_without_body_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    for seconds in ("BODY_SECONDS", "STOP_SECONDS"):
        monkeypatch.setattr(f"roll.agents.gateway.server.{seconds}", limits.LOOK)

    async def work() -> None:
        async with served(quick()) as one:
            reader, writer = await asyncio.open_connection(
                LOOPBACK, int(one.gateway.base_url.split(":")[2].split("/")[0])
            )
            head = (
                f"POST /v1/responses HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {one.key}\r\nContent-Length: "
                f"100\r\n\r\n{{"
            )
            writer.write(head.encode())
            assert (await reader.readline()).startswith(b"HTTP/1.1 408 ")
            writer.close()

    run(work())


def test_fields_ignored_by_openai_keep_the_conversation() -> None:
    """Developer messages, text parts, null contents, and keys that the client adds to the messages that it sends
    back.
    """

    async def work() -> None:
        async with served(quick()) as one:
            parts = [{"type": "text", "text": "g"}, {"type": "text", "text": "o"}]
            messages: Any = [{"role": "developer", "content": "be"}, {"role": "user", "content": parts}]
            first = await one.client.chat.completions.create(model="m", messages=messages)
            said: Any = {**first.choices[0].message.model_dump(), "refusal": None, "annotations": [], "audio": None}
            await one.client.chat.completions.create(
                model="m", messages=[{"role": "system", "content": "be"}, USER, said, USER]
            )
            episode = record(one.session)
            assert laid(episode) == [["system:be|user:go|assistant:", "turn 1|", "user:go|assistant:", "turn 2|"]]

    run(work())


def test_as_many_sessions_as_there_may_be() -> None:
    async def work() -> None:
        async with served(quick(), sessions=2) as one:
            waiting = one.gateway.serving(session(one.engine))
            async with one.gateway.serving(session(one.engine)):
                third = asyncio.create_task(waiting.__aenter__())
                await asyncio.sleep(limits.LOOK)
                assert not third.done()
            assert (await third).startswith("roll-")
            await waiting.__aexit__(None, None, None)

    run(work())


def test_engine_failure_is_server_error_for_agent() -> None:
    class Broken(Engine):
        async def generate(self, *given: Any, **keys: Any) -> Any:
            await asyncio.sleep(0)
            raise RollError("no engine is left")
            yield

    async def work() -> None:
        async with served(Broken(turns())) as one:
            client = one.client.with_options(max_retries=0)
            with pytest.raises(openai.InternalServerError, match="no engine is left"):
                await client.chat.completions.create(model="m", messages=[USER])
            with pytest.raises((openai.InternalServerError, openai.APIError), match="no engine is left"):
                async for _ in await client.chat.completions.create(model="m", messages=[USER], stream=True):
                    pass

    run(work())


def test_it_is_gone_when_it_is_closed() -> None:
    async def work() -> None:
        async with served(Engine(turns(), takes=limits.CALL)) as one:
            asking = asyncio.create_task(
                one.client.with_options(max_retries=0).chat.completions.create(model="m", messages=[USER])
            )
            while not one.engine.requests:
                await asyncio.sleep(limits.LOOK)
            url = one.gateway.base_url
        with pytest.raises(openai.APIError):
            await asking
        async with httpx.AsyncClient(timeout=limits.CALL) as client:
            with pytest.raises(httpx.ConnectError):
                await client.get(f"{url}/models")
        assert one.session.stop is StopReason.COMPLETED and record(one.session).length == 0

    run(work())


def test_occupied_gateway_address_is_a_configuration_fault() -> None:
    async def work() -> None:
        with socket.create_server((LOOPBACK, 0)) as taken:
            gateway, port = Gateway(GatewayBounds(BODY_BYTES, 1)), taken.getsockname()[1]
            with pytest.raises(ConfigError, match=f"gateway: cannot listen on {LOOPBACK}:{port}"):
                async with gateway.listening(LOOPBACK, port):
                    pass

    run(work())


def test_it_listens_where_it_is_told_alone() -> None:
    async def work() -> None:
        async with served(quick()) as one:
            port = one.gateway.base_url.split(":")[2].split("/")[0]
            assert one.gateway.base_url == f"http://{LOOPBACK}:{port}/v1"
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection("127.0.0.2", int(port))
        gateway = Gateway(GatewayBounds(BODY_BYTES, 1))
        async with gateway.listening("0.0.0.0", 0):
            assert gateway.base_url.startswith(f"http://{LOOPBACK}:"), "the run's agents are on this machine"

    run(work())


@pytest.mark.parametrize("encoding", ["ascii", "surrogatepass"])
def test_halves_of_surrogate_pairs_are_replaced(encoding: str) -> None:
    async def work() -> None:
        body = {"messages": [{"role": "user", "content": "cut: \ud83d"}], "model": "\udc00", "tools": [ADD]}
        sent = json.dumps(body, ensure_ascii=encoding == "ascii").encode(errors="surrogatepass")
        async with served(quick()) as one, httpx.AsyncClient(timeout=limits.CALL) as client:
            answer = await client.post(
                f"{one.gateway.base_url}/chat/completions", content=sent, headers=bearer(one.key)
            )
            assert answer.status_code == 200 and answer.json()["model"] == "\ufffd"
        assert [request.context for request in one.engine.requests] == ["user:cut: \ufffd|assistant:"]

    run(work())


def test_loop_serves_others_while_long_text_is_tokenised(tiny_model: Path) -> None:
    tokenizer = load_tokenizer(str(tiny_model))
    text = "lorem ipsum 12 " * (1 << 16)

    async def work() -> None:
        chat = chat_renderer(tokenizer, tiny_model, "chatml")
        opened = AgentSession(quick(), chat, Sampling(40), SessionBounds(4, 1 << 30), 1, time.time)
        asking = asyncio.create_task(ask(opened, [{"role": "user", "content": text}]))
        looks = 0
        while not asking.done():
            await asyncio.sleep(0.001)
            looks += 1
        asking.cancel()
        assert looks > 20
        await opened.close()

    run(work())
