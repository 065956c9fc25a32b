"""A session keeps the tokens: every conversation continues from exactly the tokens that the engine saw and sampled."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.agents.environments.base import Message
from roll.agents.gateway.asked import PolicyAnswer, RequestRefused
from roll.agents.gateway.session import ABANDONED_SECONDS, AgentSession
from roll.data.chat import TemplateFault
from roll.data.renderers.base import Parsed
from roll.errors import RollError
from roll.types import Ints, StopReason
from tests.unit.gateway.asking import (
    NOW,
    SEQUENCE,
    USER,
    ask,
    check_exact,
    given_up,
    laid,
    record,
    session,
    tool,
    turns,
)
from tests.unit.rollout.playing import Chat, Engine
from tests.unit.rollout.simulated import VirtualTime

T = TypeVar("T")


def run(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine in virtual time."""
    loop = VirtualTime()
    try:
        return loop.run_until_complete(work())
    finally:
        loop.close()


def played(
    work: Callable[[AgentSession], Coroutine[Any, Any, T]], engine: Engine, **keys: Any
) -> tuple[T, AgentSession]:
    async def go() -> tuple[T, AgentSession]:
        opened = session(engine, **keys)
        return await work(opened), opened

    return run(go)


def says(*texts: str) -> Engine:
    left = iter(texts)
    return Engine(lambda _: next(left))


def test_tool_conversation_is_one_trajectory_of_engine_tokens() -> None:
    engine = says("!add(2) !add(3)", "five")

    async def work(opened: AgentSession) -> list[PolicyAnswer]:
        first = await ask(opened, [USER])
        calls = first.message["tool_calls"]
        answers = [tool(call["id"], str(number)) for number, call in enumerate(calls)]
        second = await ask(opened, [USER, first.message, *answers])
        return [first, second]

    [first, second], opened = played(work, engine)
    assert [call["function"] for call in first.message["tool_calls"]] == [
        {"name": "add", "arguments": '{"text": "2"}'},
        {"name": "add", "arguments": '{"text": "3"}'},
    ]
    assert first.finish == "tool_calls" and second.finish == "stop" and second.message["content"] == "five"
    assert (first.prompt_tokens, first.completion_tokens) == (len("user:go|assistant:"), len("!add(2) !add(3)|"))
    assert second.prompt_tokens == first.prompt_tokens + first.completion_tokens + len("tool:0|tool:1|assistant:")
    assert first.created == int(NOW)
    episode = record(opened)
    assert laid(episode) == [["user:go|assistant:", "!add(2) !add(3)|", "tool:0|tool:1|assistant:", "five|"]]
    assert list(episode.turn_states) == ["go", "0\n1"] and episode.metrics["tool_calls"] == 2
    assert len(episode.sampled[0].calls) == 2
    check_exact(episode, engine)


def test_requests_share_engine_session_with_different_seeds() -> None:
    engine = Engine(turns())

    async def work(opened: AgentSession) -> None:
        first = await ask(opened, [USER])
        await ask(opened, [USER, first.message, USER])

    played(work, engine)
    first, second = engine.requests
    assert first.session is not None and first.session is second.session and first.seed != second.seed


def test_retry_returns_same_answer_without_sampling() -> None:
    engine = Engine(turns())

    async def work(opened: AgentSession) -> list[PolicyAnswer]:
        hung_up = asyncio.create_task(ask(opened, [USER]))
        await asyncio.sleep(0)
        beside = asyncio.create_task(ask(opened, [USER]))
        await asyncio.sleep(0)
        await given_up(hung_up)
        return [await beside, await ask(opened, [USER])]

    [beside, later], opened = played(work, engine)
    assert beside is later and len(engine.requests) == 1
    assert laid(record(opened)) == [["user:go|assistant:", "turn 1|"]]


def test_sampling_ends_once_nobody_has_waited_for_long() -> None:
    """A request that comes back in time is the same; one that does not is aborted, and leaves its trajectory free."""
    engine = Engine(turns(), takes=1.0)

    async def work(opened: AgentSession) -> None:
        first = await ask(opened, [USER])
        conversation, engine.takes = [USER, first.message, USER], 4 * ABANDONED_SECONDS
        for pause in (0.9 * ABANDONED_SECONDS, 0.9 * ABANDONED_SECONDS, 1.1 * ABANDONED_SECONDS):
            waiting = asyncio.create_task(ask(opened, conversation))
            await asyncio.sleep(1)
            await given_up(waiting)
            assert (len(engine.requests), engine.cancelled) == (2, 0)
            await asyncio.sleep(pause)
        assert (len(engine.requests), engine.cancelled) == (2, 1)
        assert (await ask(opened, conversation)).message["content"] == "turn 2" and len(engine.requests) == 3

    _, opened = played(work, engine)
    assert laid(record(opened)) == [["user:go|assistant:", "turn 1|", "user:go|assistant:", "turn 2|"]]


def test_diverging_history_forks_with_shared_tokens_as_context() -> None:
    engine = says("one", "two", "three", "four")

    async def work(opened: AgentSession) -> None:
        first = await ask(opened, [USER])
        begun = [USER, first.message]
        await ask(opened, [*begun, {"role": "user", "content": "left"}])
        await ask(opened, [*begun, {"role": "user", "content": "right"}])
        await ask(opened, [{"role": "user", "content": "anew"}])

    _, opened = played(work, engine)
    episode = record(opened)
    assert laid(episode) == [
        ["user:go|assistant:", "one|", "user:left|assistant:", "two|"],
        ["user:go|assistant:one|user:right|assistant:", "three|"],
        ["user:anew|assistant:", "four|"],
    ]
    assert [path.stop for path in episode.trajectories] == [StopReason.COMPLETED] * 3
    check_exact(episode, engine)


def test_second_continuation_of_an_answer_forks() -> None:
    engine = Engine(turns())

    async def work(opened: AgentSession) -> None:
        first = await ask(opened, [USER])
        both = [ask(opened, [USER, first.message, {"role": "user", "content": side}]) for side in ("left", "right")]
        await asyncio.gather(*both)

    _, opened = played(work, engine)
    episode = record(opened)
    assert [len(path.segments) for path in episode.trajectories] == [4, 2]
    check_exact(episode, engine)


def test_tools_are_part_of_a_history() -> None:
    engine, schema = Engine(turns()), {"type": "function", "function": {"name": "add"}}

    async def work(opened: AgentSession) -> None:
        first = await ask(opened, [USER], [schema])
        await ask(opened, [USER, first.message, USER])

    _, opened = played(work, engine)
    assert len(record(opened).trajectories) == 2


def test_without_a_bridge_the_conversation_is_given_anew() -> None:
    engine = Engine(turns())

    async def work(opened: AgentSession) -> None:
        first = await ask(opened, [USER])
        await ask(opened, [USER, first.message, USER])

    _, opened = played(work, engine, chat=Chat(has_bridge=False))
    assert laid(record(opened)) == [
        ["user:go|assistant:", "turn 1|"],
        ["user:go|assistant:turn 1|user:go|assistant:", "turn 2|"],
    ]


def test_rewritten_assistant_message_is_recognised() -> None:
    engine = says("!add(2)", "done")

    async def work(opened: AgentSession) -> None:
        first = await ask(opened, [USER])
        [call] = first.message["tool_calls"]
        function = {"name": "add", "arguments": '{ "text" :"2" }'}
        anew = {
            "role": "assistant",
            "content": " !add(2)\n",
            "tool_calls": [{"id": "mine", "type": "function", "function": function}],
        }
        await ask(opened, [USER, anew, tool(call["id"], "2")])

    _, opened = played(work, engine)
    assert len(record(opened).trajectories) == 1


def test_call_ids_differ_but_renderer_sees_its_own() -> None:
    seen: list[Sequence[Message]] = []

    class Noting(Chat):
        def bridge(
            self, before: Ints, sampled: Ints, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
        ) -> Ints | None:
            seen.append(messages)
            return super().bridge(before, sampled, messages, tools)

    async def work(opened: AgentSession) -> list[str]:
        conversation: list[Any] = [USER]
        found = []
        for _ in range(2):
            answer = await ask(opened, conversation)
            [call] = answer.message["tool_calls"]
            found.append(call["id"])
            conversation += [answer.message, tool(call["id"], "2")]
        await ask(opened, conversation)
        return found

    found, _ = played(work, says("!add(2)", "!add(2)", "done"), chat=Noting())
    assert len(set(found)) == 2, "an agent may distinguish calls by their ids"
    assert [message["tool_call_id"] for messages in seen for message in messages] == ["0", "0"], (
        "the renderer numbers calls per turn"
    )


def test_calls_that_cannot_be_read_are_text() -> None:
    answer, opened = played(lambda opened: ask(opened, [USER]), says("!add"))
    assert answer.message["content"] == "!add\n!add" and "tool_calls" not in answer.message and answer.finish == "stop"
    assert opened.counts["tool_errors"] == 1


def test_stop_text_ends_answer_and_is_hidden() -> None:
    engine = says("up to END and on")
    answer, opened = played(lambda opened: ask(opened, [USER], stop=("END",)), engine)
    assert answer.message["content"] == "up to " and engine.requests[0].sampling.stop == ("END",)
    assert laid(record(opened)) == [["user:go|assistant:", "up to END and on|"]], "the tokens stay as they were sampled"


LONG = "x" * 100


@pytest.mark.parametrize(
    ("keys", "most", "tokens", "stop"),
    [
        ({}, None, 40, StopReason.LENGTH),
        ({}, 7, 7, StopReason.COMPLETED),
        ({"sequence": 30}, None, 12, StopReason.CONTEXT_FULL),
        ({"sequence": 30}, 5, 5, StopReason.COMPLETED),
        ({}, 400, 40, StopReason.LENGTH),
    ],
)
def test_an_answer_has_the_least_of_all_budgets(
    keys: dict[str, Any], most: int | None, tokens: int, stop: StopReason
) -> None:
    answer, opened = played(lambda opened: ask(opened, [USER], max_tokens=most), says(LONG), **keys)
    assert answer.completion_tokens == tokens and answer.finish == "length" and opened.stop is stop


def test_too_long_conversation_is_not_sampled() -> None:
    engine = Engine(turns())

    async def work(opened: AgentSession) -> list[PolicyAnswer]:
        long = await ask(opened, [{"role": "user", "content": LONG}])
        assert opened.stop is StopReason.CONTEXT_FULL
        return [long, await ask(opened, [USER])]

    [long, short], opened = played(work, engine, sequence=60)
    assert (long.finish, long.completion_tokens, long.message["content"]) == ("length", 0, "")
    assert short.finish == "stop" and opened.stop is StopReason.COMPLETED and len(engine.requests) == 1


def test_session_ends_after_its_last_turn() -> None:
    engine = Engine(turns())

    async def work(opened: AgentSession) -> PolicyAnswer:
        over = asyncio.create_task(opened.over())
        first = await ask(opened, [USER])
        await ask(opened, [USER, first.message, USER])
        assert not over.done() and opened.stop is StopReason.COMPLETED
        refused = await ask(opened, [{"role": "user", "content": "more"}])
        await over
        assert await ask(opened, [USER]) is first, "a retry does not count as a request"
        return refused

    refused, opened = played(work, engine, requests=2)
    assert refused.finish == "length" and opened.stop is StopReason.MAX_TURNS and len(engine.requests) == 2


def test_answer_aborted_by_engine_ends_session() -> None:
    async def work(opened: AgentSession) -> None:
        await ask(opened, [USER])
        await opened.over()

    _, opened = played(work, Engine(turns(), aborts=True))
    assert opened.stop is StopReason.ABORTED


def test_engine_failure_is_raised_to_the_episode() -> None:
    class Broken(Engine):
        async def generate(self, *given: Any, **keys: Any) -> Any:
            raise RollError("no engine is left")
            yield

    async def work(opened: AgentSession) -> None:
        with pytest.raises(RollError, match="no engine is left"):
            await ask(opened, [USER])
        with pytest.raises(RollError, match="no engine is left"):
            await opened.over()

    played(work, Broken(turns()))


def test_what_the_chat_template_refuses_is_refused() -> None:
    class Strict(Chat):
        def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> Ints:
            raise TemplateFault("no system message")

    async def work(opened: AgentSession) -> None:
        with pytest.raises(RequestRefused, match="messages: .*: no system message") as refused:
            await ask(opened, [USER])
        assert refused.value.status == 400 and "no system message" in opened.refused

    played(work, Engine(turns()), chat=Strict())


def test_a_closed_session_answers_nothing() -> None:
    engine = Engine(turns())

    async def work(opened: AgentSession) -> None:
        waiting = asyncio.create_task(ask(opened, [USER]))
        await asyncio.sleep(0.5)
        await opened.close()
        for asked in (waiting, asyncio.create_task(ask(opened, [USER]))):
            with pytest.raises(RequestRefused, match="has ended") as refused:
                await asked
            assert refused.value.status == 410

    _, opened = played(work, engine)
    assert opened.episode(StopReason.DEADLINE, 0.0, "prompt").length == 0


@given(st.integers(0, 10**9))
def test_random_conversations_train_on_engine_tokens(seed: int) -> None:
    """Agents continue from any earlier answer, several at a time, and retry requests."""
    draw, engine = random.Random(seed), Engine(lambda context: f"a{len(context)}")

    async def work(opened: AgentSession) -> None:
        ended: list[list[Message]] = [[]]

        async def one() -> None:
            before = draw.choice(ended)
            asked = [*before, {"role": "user", "content": str(draw.randrange(4))}]
            answers = await asyncio.gather(*[ask(opened, asked) for _ in range(draw.choice([1, 1, 2]))])
            assert all(answer is answers[0] for answer in answers)
            if answers[0].completion_tokens:
                ended.append([*asked, answers[0].message])

        for _ in range(6):
            await asyncio.gather(*[one() for _ in range(draw.randrange(1, 4))])

    _, opened = played(work, engine, requests=100, sequence=300)
    check_exact(record(opened), engine)


def test_any_error_of_a_renderer_refuses_one_request() -> None:
    class Broken(Chat):
        def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> Ints:
            if messages == [USER]:
                return super().render(messages, tools)
            raise RuntimeError("the tokenizer gave up")

        def parse(self, sampled: Ints, tools: Sequence[Mapping[str, Any]]) -> Parsed:
            if tools:
                raise RecursionError("the parser gave up")
            return super().parse(sampled, tools)

    async def work(opened: AgentSession) -> None:
        for messages, tools in (([USER, USER], ()), ([USER], [{"type": "function"}])):
            with pytest.raises(RequestRefused) as refused:
                await ask(opened, messages, tools)
            assert refused.value.status == 400 and "gave up" in opened.refused
        assert (await ask(opened, [USER])).message["content"] == "turn 1"

    played(work, Engine(turns()), chat=Broken())


def test_request_of_too_many_characters_is_not_rendered() -> None:
    class Counting(Chat):
        longest_token = 4
        rendered = 0

        def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> Ints:
            self.rendered += 1
            return super().render(messages, tools)

    chat, engine = Counting(), Engine(turns())

    async def work(opened: AgentSession) -> None:
        long = "x" * (4 * SEQUENCE)
        for messages, tools in (
            ([{"role": "user", "content": long}], ()),
            ([USER], [{"type": "function", "function": {"name": "f", "description": long}}]),
        ):
            answer = await ask(opened, messages, tools)
            assert answer.finish == "length" and opened.stop is StopReason.CONTEXT_FULL
        assert chat.rendered == 0 and not engine.requests
        await ask(opened, [USER])
        assert chat.rendered == 1

    played(work, engine, chat=chat)
