"""The gateway's messages API, tested with Anthropic's own client."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import anthropic
import httpx
import pytest

from roll.data.renderers.base import Parsed
from roll.errors import RollError
from roll.types import Ints
from tests import limits
from tests.unit.gateway.asking import check_exact, laid, record, turns
from tests.unit.gateway.serving import BODY_BYTES, Served, run, served
from tests.unit.gateway.test_http import bearer, quick, scripted
from tests.unit.rollout.playing import Chat, Engine

ADD: Any = {
    "name": "add",
    "description": "Adds one.",
    "input_schema": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
    "cache_control": {"type": "ephemeral"},
}
USER: Any = {"role": "user", "content": "go"}
ASKED: Any = {"model": "mine", "max_tokens": 99, "messages": [USER]}


class Thinking(Chat):
    """Reads what a turn has before `~` as its thinking."""

    def parse(self, sampled: Ints, tools: Sequence[Mapping[str, Any]]) -> Parsed:
        found = super().parse(sampled, tools)
        thought, _, said = found.message["content"].rpartition("~")
        return replace(found, message={**found.message, "content": said, "reasoning_content": thought})


@asynccontextmanager
async def client_of(one: Served) -> AsyncGenerator[anthropic.AsyncAnthropic, None]:
    address = one.gateway.base_url.removesuffix("/v1")
    async with anthropic.AsyncAnthropic(base_url=address, api_key=one.key, timeout=limits.CALL) as client:
        yield client


async def asked(client: anthropic.AsyncAnthropic, stream: bool, **keys: Any) -> anthropic.types.Message:
    if not stream:
        return await client.messages.create(**{**ASKED, **keys})
    async with client.messages.stream(**{**ASKED, **keys}) as streamed:
        return await streamed.get_final_message()


def added(message: anthropic.types.Message) -> Any:
    """Return the user's message with the results of the calls in a message."""
    calls = [block for block in message.content if block.type == "tool_use"]
    results = [(call.id, str(int(str(call.input["text"])) + 1)) for call in calls]
    blocks = [{"type": "tool_result", "tool_use_id": identity, "content": text} for identity, text in results]
    return {"role": "user", "content": blocks}


@pytest.mark.parametrize("stream", [False, True])
def test_anthropic_client_conversation_is_one_trajectory(stream: bool) -> None:
    async def work() -> None:
        async with served(scripted("!add(1) !add(41)", "!add(42)", "done")) as one, client_of(one) as client:
            messages: list[Any] = [USER]
            while True:
                answer = await asked(client, stream, messages=messages, tools=[ADD])
                messages.append({"role": "assistant", "content": answer.content})
                if answer.stop_reason != "tool_use":
                    break
                messages.append(added(answer))
            assert (answer.stop_reason, answer.model) == ("end_turn", "mine")
            assert [block.to_dict() for block in answer.content] == [{"type": "text", "text": "done"}]
            assert laid(record(one.session)) == [
                [
                    *("user:go|assistant:", "!add(1) !add(41)|", "tool:2|tool:42|assistant:", "!add(42)|"),
                    *("tool:43|assistant:", "done|"),
                ]
            ]
            check_exact(record(one.session), one.engine)

    run(work())


def test_count_is_what_the_engine_reads() -> None:
    async def work() -> None:
        async with served(scripted("!add(1)", "done")) as one, client_of(one) as client:
            given: Any = {"model": "m", "messages": [USER], "system": "be", "tools": [ADD]}
            counted = [await client.messages.count_tokens(**given)]
            first = await asked(client, False, **given)
            given["messages"] = [USER, {"role": "assistant", "content": first.content}, added(first)]
            counted += [await client.messages.count_tokens(**given) for _ in range(2)]
            second = await asked(client, False, **given)
            found = [count.input_tokens for count in counted]
            lengths = [len(request.context) for request in one.engine.requests]
            assert (
                found == [first.usage.input_tokens, *2 * [second.usage.input_tokens]] == [lengths[0], *2 * [lengths[1]]]
            )
            assert len(record(one.session).trajectories) == 1, "a count does not continue the trajectory"
            with pytest.raises(anthropic.APIStatusError, match="messages: .* sequence_length"):
                await client.messages.count_tokens(model="m", messages=[{"role": "user", "content": "x" * 50_000}])

    run(work())


def test_stream_has_the_events_in_anthropics_order() -> None:
    async def work() -> None:
        async with (
            served(scripted("why~!add(1)"), chat=Thinking()) as one,
            httpx.AsyncClient(timeout=limits.CALL) as client,
        ):
            body = {**ASKED, "tools": [ADD], "stream": True, "thinking": {"type": "adaptive"}}
            answer = await client.post(f"{one.gateway.base_url}/messages", json=body, headers={"x-api-key": one.key})
            lines = [event.split("\n") for event in answer.text.strip().split("\n\n")]
            events = [json.loads(data.removeprefix("data: ")) for _, data in lines]
            assert [name.removeprefix("event: ") for name, _ in lines] == [event["type"] for event in events]
            kinds = [event.get("delta", {}).get("type", event["type"]) for event in events]
            started, stopped = "content_block_start", "content_block_stop"
            assert kinds == [
                *("message_start", "ping"),
                *(started, "thinking_delta", "signature_delta", stopped),
                *(started, "text_delta", stopped, started, "input_json_delta", stopped),
                *("message_delta", "message_stop"),
            ]
            assert [event["index"] for event in events if "index" in event] == [0, 0, 0, 0, 1, 1, 1, 2, 2, 2]
            assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
            assert events[-2]["usage"]["output_tokens"] == len("why~!add(1)|")

    run(work())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("keys", "reason", "text"),
    [
        ({}, "end_turn", "up to END and on"),
        ({"max_tokens": 4}, "max_tokens", "up t"),
        ({"stop_sequences": ["and", "END"]}, "stop_sequence", "up to "),
    ],
)
def test_stop_reason_and_usage(stream: bool, keys: dict[str, Any], reason: str, text: str) -> None:
    async def work() -> None:
        async with served(scripted("up to END and on")) as one, client_of(one) as client:
            answer = await asked(client, stream, **keys)
            assert answer.stop_reason == reason and [block.to_dict() for block in answer.content] == [
                {"type": "text", "text": text}
            ]
            assert answer.stop_sequence == ("END" if reason == "stop_sequence" else None)
            usage = answer.usage
            assert (usage.input_tokens, usage.cache_read_input_tokens, usage.cache_creation_input_tokens) == (18, 0, 0)
            assert usage.output_tokens == len(laid(record(one.session))[0][1])

    run(work())


@pytest.mark.parametrize(
    ("thinking", "shown"),
    [
        (None, []),
        ({"type": "disabled"}, []),
        ({"type": "enabled", "budget_tokens": 1024}, ["why"]),
        ({"type": "adaptive", "display": "omitted"}, [""]),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_thinking_is_shown_as_asked_and_kept(stream: bool, thinking: Any, shown: list[str]) -> None:
    async def work() -> None:
        async with served(scripted("why~so", "then~on"), chat=Thinking()) as one, client_of(one) as client:
            keys = {} if thinking is None else {"thinking": thinking}
            first = await asked(client, stream, **keys)
            assert [block.thinking for block in first.content if block.type == "thinking"] == shown
            assert [block.text for block in first.content if block.type == "text"] == ["so"]
            assert all(block.signature for block in first.content if block.type == "thinking")
            await asked(client, stream, messages=[USER, {"role": "assistant", "content": first.content}, USER], **keys)
            assert laid(record(one.session)) == [["user:go|assistant:", "why~so|", "user:go|assistant:", "then~on|"]]

    run(work())


def test_every_api_tells_the_cached_tokens() -> None:
    async def work() -> None:
        async with served(Engine(turns(), takes=0, cached=16)) as one, client_of(one) as client:
            for stream in (False, True):
                usage = (await asked(client, stream)).usage
                assert (usage.input_tokens, usage.cache_read_input_tokens) == (2, 16), "they add up to the whole input"
            chat = (await one.client.chat.completions.create(model="m", messages=[USER])).usage
            response = (await one.client.responses.create(model="m", input="go")).usage
            assert chat is not None and chat.prompt_tokens_details is not None and response is not None
            assert chat.prompt_tokens == response.input_tokens == 18
            assert chat.prompt_tokens_details.cached_tokens == response.input_tokens_details.cached_tokens == 16

    run(work())


def test_policy_reads_system_texts_and_failed_results() -> None:
    async def work() -> None:
        async with served(quick()) as one, client_of(one) as client:
            cached = {"type": "text", "text": "be ", "cache_control": {"type": "ephemeral"}}
            call = {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"text": "1"}}
            result = {"type": "tool_result", "tool_use_id": "toolu_1", "is_error": True}
            await asked(
                client,
                False,
                system=[cached, {"type": "text", "text": "brief"}],
                messages=[
                    {"role": "user", "content": [{"type": "text", "text": "g"}, {"type": "text", "text": "o"}]},
                    {"role": "assistant", "content": [{"type": "text", "text": "wait"}, call]},
                    {"role": "user", "content": [{**result, "content": [{"type": "text", "text": "no"}]}, cached]},
                    {"role": "system", "content": "still"},
                    {"role": "user", "content": "on"},
                ],
                tools=[ADD],
            )
            [request] = one.engine.requests
            assert request.context == (
                "system:be brief|user:go|assistant:wait|tool:Error: no|user:be |system:still|user:on|assistant:"
            )

    run(work())


def test_conversation_goes_on_in_another_api() -> None:
    async def work() -> None:
        async with served(scripted("!add(1)", "done")) as one, client_of(one) as client:
            schema = {key: ADD[key] for key in ("name", "description")} | {"parameters": ADD["input_schema"]}
            tools: Any = [{"type": "function", "function": schema}]
            first = await one.client.chat.completions.create(model="m", messages=[USER], tools=tools)
            [call] = first.choices[0].message.tool_calls or []
            block = {"type": "tool_use", "id": call.id, "name": "add", "input": {"text": "1"}}
            said = {"role": "assistant", "content": [{"type": "text", "text": "!add(1)"}, block]}
            result = {"type": "tool_result", "tool_use_id": call.id, "content": "2"}
            await asked(client, True, messages=[USER, said, {"role": "user", "content": [result]}], tools=[ADD])
            assert len(record(one.session).trajectories) == 1

    run(work())


def block(kind: str, **keys: Any) -> Any:
    return {"messages": [{"role": "user", "content": [{"type": kind, **keys}]}]}


def said(kind: str, **keys: Any) -> Any:
    return {"messages": [USER, {"role": "assistant", "content": [{"type": kind, **keys}]}, USER]}


@pytest.mark.parametrize(
    ("changed", "place"),
    [
        ({"frequency_penalty": 1}, "frequency_penalty"),
        ({"container": "c"}, "container"),
        ({"mcp_servers": [{"name": "x"}]}, "mcp_servers"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stream": "yes"}, "stream"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type"),
        ({"thinking": {"type": "adaptive", "display": "short"}}, "thinking.display"),
        ({"tools": [ADD], "tool_choice": {"type": "any"}}, "tool_choice.type"),
        ({"tools": [ADD], "tool_choice": {"type": "tool", "name": "add"}}, "tool_choice.type"),
        ({"tools": [ADD], "tool_choice": {"type": "none"}}, "tool_choice.type"),
        (
            {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
            "tool_choice.disable_parallel_tool_use",
        ),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
        ({"tools": [{"name": "add"}]}, "tools[0]"),
        ({"tools": [{"input_schema": {}}]}, "tools[0]"),
        ({"tools": [{**ADD, "strict": True}]}, "tools[0].strict"),
        ({"tools": [{**ADD, "input_examples": [{}]}]}, "tools[0].input_examples"),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"messages": None}, "messages"),
        ({"messages": [USER, {"role": "assistant", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{**USER, "name": "x"}]}, "messages[0].name"),
        (block("image", source={}), "messages[0].content[0].type"),
        (block("document", source={}), "messages[0].content[0].type"),
        (block("thinking", thinking="x", signature=""), "messages[0].content[0].type"),
        (block("text", text=3), "messages[0].content[0].text"),
        (block("text", text="x", citations=[{}]), "messages[0].content[0].citations"),
        (block("tool_result"), "messages[0].content[0].tool_use_id"),
        (block("tool_result", tool_use_id="x", content=[{"type": "image"}]), "messages[0].content[0].content[0].type"),
        (said("redacted_thinking", data="x"), "messages[1].content[0].type"),
        (said("tool_use", id="x", name="add", input=[1]), "messages[1].content[0].input"),
        (said("tool_use", name="add", input={}), "messages[1].content[0]"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}, {"type": "tool_result"}]}]},
            "messages[0].content[1]",
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(changed: Mapping[str, Any], place: str) -> None:
    async def work() -> None:
        async with served(quick()) as one, httpx.AsyncClient(timeout=limits.CALL) as client:
            url = f"{one.gateway.base_url}/messages"
            answer = await client.post(url, json={**ASKED, **changed}, headers=bearer(one.key))
            said = answer.json()
            assert answer.status_code == 400 and said["type"] == "error", answer.text
            assert said["error"]["type"] == "invalid_request_error"
            assert said["error"]["message"].startswith(f"{place}: "), said
            assert one.session.refused == said["error"]["message"] and not one.engine.requests

    run(work())


def test_errors_are_those_of_anthropics_client() -> None:
    async def work() -> None:
        async with served(quick()) as one, client_of(one) as client:
            with pytest.raises(anthropic.AuthenticationError, match="x-api-key"):
                await asked(client.with_options(api_key="wrong"), False)
            with pytest.raises(anthropic.NotFoundError, match="/v1/messages"):
                await client.post("/v1/messages/batches", cast_to=object)
            with pytest.raises(anthropic.APIStatusError, match="body_mib") as large:
                await asked(client, False, system="x" * BODY_BYTES)
            body: Any = large.value.body
            assert (body["type"], body["error"]["type"]) == ("error", "request_too_large")
            with pytest.raises(anthropic.BadRequestError, match="end with a message"):
                await asked(client, True, messages=[USER, {"role": "assistant", "content": "x"}])
            assert not one.engine.requests

    run(work())


@pytest.mark.parametrize("takes", [0.0, 10 * limits.LOOK])
@pytest.mark.parametrize("stream", [False, True])
def test_engine_failure_is_an_api_error(stream: bool, takes: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roll.agents.gateway.server.KEEP_ALIVE_SECONDS", limits.LOOK)

    class Broken(Engine):
        async def generate(self, *given: Any, **keys: Any) -> Any:
            await asyncio.sleep(takes)
            raise RollError("no engine is left")
            yield

    async def work() -> None:
        async with served(Broken(turns())) as one, client_of(one) as client:
            with pytest.raises(anthropic.APIStatusError, match=r"api_error.*no engine is left"):
                await asked(client.with_options(max_retries=0), stream)

    run(work())


def test_settings_that_the_run_decides_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        async with served(quick()) as one, client_of(one) as client:
            for number in range(2):
                more = {"top_p": 1.0, "temperature": 0.5, "metadata": {"user_id": str(number)}}
                await asked(client, False, extra_body=more, output_config={"effort": "low"})
            await one.client.chat.completions.create(model="m", messages=[USER], temperature=0.25, top_p=0.5)
            assert len(one.engine.requests) == 3 and {
                request.sampling.temperature for request in one.engine.requests
            } == {1.0}

    with caplog.at_level(logging.WARNING, "roll.agents.gateway.server"):
        run(work())
    assert [record.getMessage().split(",")[0] for record in caplog.records] == [
        "temperature: agents ask for 0.5",
        "output_config.effort: agents ask for 'low'",
        "top_p: agents ask for 0.5",
    ]


@pytest.mark.parametrize("stream", [False, True])
def test_generation_is_aborted_after_its_client_has_gone(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roll.agents.gateway.server.KEEP_ALIVE_SECONDS", limits.LOOK)
    monkeypatch.setattr("roll.agents.gateway.session.ABANDONED_SECONDS", limits.LOOK)

    async def work() -> None:
        engine = Engine(turns(), takes=limits.CALL)
        async with served(engine) as one, client_of(one) as client:
            asking = asyncio.create_task(asked(client, stream))
            await limits.comes_true(lambda: bool(engine.requests), "the engine samples")
            asking.cancel()
            await limits.comes_true(lambda: engine.cancelled == 1, "the engine has aborted the request")
            assert record(one.session).length == 0, "what nobody has received is not trained on"
            engine.takes = 0
            answer = await asked(client, stream)
            assert answer.content[0].to_dict() == {"type": "text", "text": "turn 1"}
            assert laid(record(one.session)) == [["user:go|assistant:", "turn 1|"]]
            assert len(engine.requests) == 2

    run(work())


def test_stream_cut_and_sent_again_is_one_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client hangs up before the answer, and while it reads it."""
    monkeypatch.setattr("roll.agents.gateway.server.KEEP_ALIVE_SECONDS", limits.LOOK)

    async def work() -> None:
        async with served(Engine(turns(), takes=limits.EXPIRY)) as one, client_of(one) as client:
            async with client.messages.stream(**ASKED):
                pass
            async with client.messages.stream(**ASKED) as stream:
                async for event in stream:
                    if event.type == "message_start":
                        break
            answer = await asked(client, True)
            assert event.type == "message_start" and answer.id == event.message.id
            assert len(one.engine.requests) == 1 and one.engine.cancelled == 0
            assert laid(record(one.session)) == [["user:go|assistant:", "turn 1|"]]
            check_exact(record(one.session), one.engine)

    run(work())
