"""The gateway's Responses API, tested with OpenAI's own client."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import httpx
import openai
import pytest

from tests import limits
from tests.unit.gateway.asking import check_exact, laid, record
from tests.unit.gateway.serving import run, served
from tests.unit.gateway.test_http import bearer, quick, scripted

ADD: Any = {
    "type": "function",
    "name": "add",
    "description": "Adds.",
    "parameters": {"type": "object", "properties": {}},
    "strict": True,
}
WHOLE = [["user:go|assistant:", "!add(1) !add(41)|", "tool:2|tool:42|assistant:", "done|"]]


def answered(items: list[Any]) -> list[Any]:
    """Return the outputs of the function calls among the items."""
    return [
        {
            "type": "function_call_output",
            "call_id": item.call_id,
            "output": str(int(json.loads(item.arguments)["text"]) + 1),
        }
        for item in items
        if item.type == "function_call"
    ]


@pytest.mark.parametrize("by_identity", [False, True])
def test_resent_or_referenced_responses_are_one_trajectory(by_identity: bool) -> None:
    async def work() -> None:
        async with served(scripted("!add(1) !add(41)", "done")) as one:
            first = await one.client.responses.create(model="m", input="go", tools=[ADD])
            outputs = answered(first.output)
            assert (
                len(outputs) == 2
                and first.status == "completed"
                and first.usage is not None
                and first.usage.input_tokens == 18
            )
            if by_identity:
                second = await one.client.responses.create(
                    model="m", input=outputs, tools=[ADD], previous_response_id=first.id
                )
            else:
                back: Any = [{"role": "user", "content": "go"}, *[item.model_dump() for item in first.output], *outputs]
                second = await one.client.responses.create(model="m", input=back, tools=[ADD])
            assert second.output_text == "done"
            assert laid(record(one.session)) == WHOLE
            check_exact(record(one.session), one.engine)

    run(work())


def test_an_agent_that_streams() -> None:
    async def work() -> None:
        async with served(scripted("!add(1) !add(41)", "done")) as one:
            async with one.client.responses.stream(model="m", input="go", tools=[ADD]) as stream:
                kinds = [event.type async for event in stream]
                first = await stream.get_final_response()
            assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
            assert kinds.count("response.function_call_arguments.done") == 2
            again = answered(list(first.output))
            async with one.client.responses.stream(
                model="m", input=again, tools=[ADD], previous_response_id=first.id
            ) as stream:
                said = [event.delta async for event in stream if event.type == "response.output_text.delta"]
            assert said == ["done"] and laid(record(one.session)) == WHOLE

    run(work())


def test_instructions_start_conversation_and_cut_answers_are_incomplete() -> None:
    async def work() -> None:
        async with served(quick()) as one:
            answer = await one.client.responses.create(model="m", input="go", instructions="be", max_output_tokens=4)
            assert answer.status == "incomplete" and answer.output_text == "turn"
            assert answer.incomplete_details is not None and answer.incomplete_details.reason == "max_output_tokens"
            await one.client.responses.create(model="m", input="on", instructions="be", previous_response_id=answer.id)
            assert laid(record(one.session)) == [
                ["system:be|user:go|assistant:", "turn", "|user:on|assistant:", "turn 2|"]
            ]

    run(work())


def test_retry_is_one_sample_across_both_apis() -> None:
    async def work() -> None:
        async with served(quick()) as one:
            first, again = [await one.client.responses.create(model="m", input="go") for _ in range(2)]
            assert first.id == again.id and len(one.engine.requests) == 1
            back: Any = [
                {"role": "user", "content": "go"},
                {"role": "assistant", "content": first.output_text},
                {"role": "user", "content": "on"},
            ]
            await one.client.chat.completions.create(model="m", messages=back)
            assert len(record(one.session).trajectories) == 1

    run(work())


@pytest.mark.parametrize(
    ("changed", "place"),
    [
        ({"input": None}, "input"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call", "call_id": "1", "name": "add", "arguments": "{"}]}, "input[0].arguments"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"previous_response_id": "resp_unknown"}, "previous_response_id"),
        ({"text": {"format": {"type": "json_schema"}}}, "text"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "x"}}, "prompt"),
        ({"max_output_tokens": -1}, "max_output_tokens"),
    ],
)
def test_what_is_not_supported_is_refused(changed: Mapping[str, Any], place: str) -> None:
    async def work() -> None:
        async with served(quick()) as one, httpx.AsyncClient(timeout=limits.CALL) as client:
            answer = await client.post(
                f"{one.gateway.base_url}/responses", json={"input": "go", **changed}, headers=bearer(one.key)
            )
            assert answer.status_code == 400 and answer.json()["error"]["param"] == place, answer.text
            with pytest.raises(openai.BadRequestError):
                await one.client.responses.create(model="m", input="go", top_logprobs=3)
            assert not one.engine.requests

    run(work())
