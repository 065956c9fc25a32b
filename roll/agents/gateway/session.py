"""A session: the policy answers the requests of one agent in one episode, and the exact tokens are recorded.

The token histories of a session: which answer a request continues, and the engine's input for the request.

A request continues an earlier answer if its messages begin with the conversation up to and including that answer. The
engine's input is then the tokens that the engine read and sampled for that answer, followed by the tokens of the new
messages. The first request that continues an answer extends the answer's trajectory. A later one forks it: it starts a
new trajectory with the same tokens, which count as given. A request that continues no answer is rendered from its
messages, and starts a new trajectory.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from roll.agents.environments.base import TOOL_ERRORS, Step
from roll.agents.episodes import NO_TOKENS, SessionGenerator, named_calls
from roll.agents.gateway.asked import AgentRequest, Message, PolicyAnswer, RequestRefused, refusal
from roll.data.chat import TemplateFault
from roll.data.renderers.base import ChatRenderer, Parsed, one_conversation
from roll.rollout.group import turn_seed
from roll.rollout.record import given, routed, sampled_segment, without_verdict
from roll.types import (
    Completion,
    Episode,
    FinishReason,
    Ints,
    RewardOutcome,
    RewardResult,
    Sampling,
    Segment,
    Session,
    StopReason,
    Trajectory,
)

Tools = Sequence[Mapping[str, Any]]


@dataclass(eq=False)
class _Path:
    """One trajectory."""

    segments: list[Segment] = field(default_factory=list)
    states: list[str] = field(default_factory=list)
    """Text of the new messages before each sampled segment."""


@dataclass(eq=False)
class _Answered:
    """An answer that a request may continue."""

    path: _Path
    before: Ints
    """[B], tokens before the answer."""
    sampled: Ints
    """[S], tokens of the answer."""
    is_continued: bool = False
    """Whether a request has continued the trajectory from this answer."""


@dataclass(eq=False)
class Opening:
    """The engine's input for a request."""

    context: Ints
    """[C], all tokens of the input."""
    given: Ints
    """The tokens of `context` that are new in the trajectory; all of them for a new trajectory."""
    digest: str
    """Digest of the conversation."""
    state: str
    """Text of the messages after the continued answer; of all messages if no answer is continued."""
    continued: _Answered | None
    """The answer whose trajectory the request extends. None for a new trajectory."""


class Histories:
    """The trajectories of a session."""

    def __init__(self, renderer: ChatRenderer) -> None:
        self._renderer = renderer
        self._paths: list[_Path] = []
        self._answered: dict[str, list[_Answered]] = {}

    @property
    def trajectories(self) -> list[list[Segment]]:
        """Return the segments of each trajectory, in the order of the trajectories' first answers."""
        return [path.segments for path in self._paths]

    @property
    def states(self) -> list[str]:
        """Return the text of the new messages before each sampled segment, trajectory by trajectory."""
        return [state for path in self._paths for state in path.states]

    def open(self, messages: Sequence[Message], inner: Sequence[Message], tools: Tools) -> Opening:
        """Return the engine's input for a request.

        Args:
            messages: the request's messages as the agent sent them. The last one is not the assistant's.
            inner: the same messages, with the call ids that the renderer assigned.

        Raises:
            TemplateFault: the chat template cannot express the messages.
        """
        digests = conversation_digests(messages, tools)
        for length in range(len(messages) - 1, 0, -1):
            found = self._answered.get(digests[length])
            if found is None or any(message["role"] == "assistant" for message in messages[length:]):
                continue
            answered = next((one for one in found if not one.is_continued), found[0])
            bridge = self._renderer.bridge(answered.before, answered.sampled, inner[length:], tools)
            if bridge is None:
                break
            context = np.concatenate([answered.before, answered.sampled, bridge], dtype=np.int32)
            state = _text(messages[length:])
            if answered.is_continued:
                return Opening(context, context, digests[-1], state, None)
            return Opening(context, bridge, digests[-1], state, answered)
        context = self._renderer.render(inner, tools)
        return Opening(context, context, digests[-1], _text(messages), None)

    def claim(self, opening: Opening) -> None:
        """Record that the request will be answered. Until `lay` or `give_up`, no other one extends its trajectory."""
        if opening.continued is not None:
            opening.continued.is_continued = True

    def lay(
        self,
        opening: Opening,
        text: str,
        completion: Completion,
        answer: Message,
        calls: Sequence[Mapping[str, Any]],
    ) -> None:
        """Record the given and the sampled tokens of an answered request.

        Args:
            text: text of the given tokens.
            answer: the message that the agent receives.
            calls: the tool calls in the message, with name and arguments.
        """
        if opening.continued is None:
            self._paths.append(path := _Path())
        else:
            path = opening.continued.path
        said = [given(opening.given, text), sampled_segment(completion, calls)]
        path.segments = routed([*path.segments, *said], completion.routes)
        path.states.append(opening.state)
        laid = np.concatenate([segment.token_ids for segment in path.segments])
        assert np.array_equal(laid[: len(laid) - len(completion.token_ids)], opening.context), (
            "a trajectory is not the engine's input"
        )
        digest = _next_digest(opening.digest, answer)
        self._answered.setdefault(digest, []).append(_Answered(path, opening.context, completion.token_ids))

    def give_up(self, opening: Opening) -> None:
        """Record that the request was not answered, so that another one may extend the same trajectory."""
        if opening.continued is not None:
            opening.continued.is_continued = False


def conversation_digests(messages: Sequence[Message], tools: Tools) -> list[str]:
    """Return the digests of all prefixes of a conversation: of no message, of the first, of the first two, and so on.

    There are [messages + 1] of them. All depend on the tools too.
    """
    digests = [hashlib.sha256(_json(list(tools))).hexdigest()]
    for message in messages:
        digests.append(_next_digest(digests[-1], message))
    return digests


def _next_digest(before: str, message: Message) -> str:
    return hashlib.sha256(before.encode() + _json(_compared(message))).hexdigest()


def _compared(message: Message) -> dict[str, Any]:
    """Return the parts of a message that identify it. They do not change if an agent drops the policy's reasoning,
    strips white space around its text, or changes the ids of its calls.
    """
    if message["role"] != "assistant":
        return {key: message.get(key) for key in ("role", "content", "tool_call_id")}
    calls = [
        [call["function"]["name"], json.loads(call["function"]["arguments"])]
        for call in message.get("tool_calls") or ()
    ]
    return {"role": "assistant", "content": message["content"].strip(), "calls": calls}


def _json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True).encode()


def _text(messages: Sequence[Message]) -> str:
    return "\n".join(message["content"] for message in messages)


A = TypeVar("A")
T = TypeVar("T")
GONE = 410
SHORT_CHARACTERS = 1 << 14
"""Most characters of a request that is rendered and tokenised within the event loop. It takes a few milliseconds."""
NOTHING: Message = {"role": "assistant", "content": ""}
ABANDONED_SECONDS = 15.0
"""Seconds for which a request that nobody waits for any more is still sampled. Clients that retry do so within 8 s."""


@dataclass(frozen=True)
class SessionBounds:
    """Limits of one episode."""

    requests: int
    """Largest number of requests, including those that are too long to be answered."""
    sequence: int
    """Largest number of tokens of a trajectory."""


@dataclass(eq=False)
class _Asked:
    """A request."""

    task: asyncio.Task[PolicyAnswer]
    callers: int = 0
    """Number of callers that wait for the answer."""
    abandoning: asyncio.TimerHandle | None = None
    """Ends the sampling. Set while nobody waits for the answer."""


class AgentSession:
    """Answers the requests of one agent. Must be used from a single asyncio event loop."""

    def __init__(
        self,
        generator: SessionGenerator,
        renderer: ChatRenderer,
        sampling: Sampling,
        bounds: SessionBounds,
        seed: int | None,
        clock: Callable[[], float],
        may_report: bool = False,
    ) -> None:
        """`sampling` and `seed` are those of an answer (None: up to the engine); `clock` returns the Unix time;
        `may_report`: the agent reports the reward of its episode.
        """
        self._generator, self._renderer, self._bounds, self._seed, self._clock = (
            generator,
            renderer,
            bounds,
            seed,
            clock,
        )
        stops = tuple(sorted({*sampling.stop_token_ids, *renderer.stop_token_ids}))
        self._sampling = replace(sampling, samples=1, stop_token_ids=stops)
        self._histories, self._engine_session = Histories(renderer), Session()
        self._answers: dict[str, _Asked] = {}
        self._inner_ids: dict[str, str] = {}
        self._requests, self._rendering = 0, asyncio.Lock()
        self._is_closed = False
        self._is_over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.counts: defaultdict[str, float] = defaultdict(float)
        """Metrics of the episode, by name."""
        self.last: Message | None = None
        self.stop = StopReason.COMPLETED
        """Why the episode ends, if the agent makes no more requests."""
        self.refused = ""
        """The last refusal; empty if there was none."""
        self.may_report = may_report
        self.reported: Step | None = None
        """The reward and the metrics that the agent has reported."""

    async def answer(self, asked: AgentRequest, identity: str) -> PolicyAnswer:
        """Return the policy's answer. Requests with the same `identity` share one answer, even if the first caller
        stopped waiting. Without any caller for ABANDONED_SECONDS, the sampling is aborted and the request forgotten.

        Raises:
            Refused: the session has ended, or the chat template cannot express the messages.
            RollError: the engine failed.
        """
        self._check_open()
        if (one := self._answers.get(identity)) is None:
            if self._requests >= self._bounds.requests:
                return self._full(StopReason.MAX_TURNS)
            self._requests += 1
            one = self._answers[identity] = _Asked(asyncio.create_task(self._sampled(asked, self._requests - 1)))
            one.task.add_done_callback(lambda _: self._ended(one, identity))
        one.callers += 1
        if one.abandoning is not None:
            one.abandoning.cancel()
        try:
            return await asyncio.shield(one.task)
        except asyncio.CancelledError:
            if one.task.cancelled():
                self._check_open()
            raise
        finally:
            one.callers -= 1
            if not one.callers and not one.task.done():
                loop = asyncio.get_running_loop()
                one.abandoning = loop.call_later(ABANDONED_SECONDS, self._abandon, identity)

    async def count(self, asked: AgentRequest) -> int:
        """Return the number of tokens that the engine would read for a request.

        Raises Refused: see `answer`; or the request is too long for its tokens to be counted.
        """
        self._check_open()
        with _as_refusal():
            async with self._rendering:
                opening = await self._rendered(asked, _characters([asked.messages, asked.tools]))
        if opening is None:
            problem = f"they have more characters than sequence_length, {self._bounds.sequence} tokens, can have"
            raise refusal("messages", problem, "send fewer or shorter ones", "too_large")
        return len(opening.context)

    def overruled(self, asked: AgentRequest) -> dict[str, Any]:
        """Return the settings of a request, by place, that the run decides otherwise."""
        own = {key: getattr(self._sampling, key) for key in ("temperature", "top_p", "top_k")}
        own |= {"frequency_penalty": 0, "presence_penalty": 0}
        return {place: value for place, value in asked.overruled.items() if own.get(place) != value}

    def report(self, step: Step) -> None:
        """Keep the reward and the metrics of the episode. The same report may be sent again.

        Raises Refused: the session has ended, its agent has another reward, or does not report rewards.
        """
        self._check_open()
        if not self.may_report:
            remedy = "set reports_reward in the agent's block, or send no reward"
            raise refusal("reward", "the environment of this agent gives the reward", remedy, "exclusive")
        if self.reported not in (None, step):
            problem = f"{step.reward:g}, but the episode has the reward {self.reported.reward:g}"
            raise refusal("reward", problem, "report it once", "duplicate")
        self.reported = step

    async def over(self) -> None:
        """Wait until no more answers are possible. `stop` has the reason. Raises RollError if the engine failed."""
        await asyncio.shield(self._is_over)

    async def close(self) -> None:
        """Cancel all sampling, and refuse all further requests."""
        self._is_closed = True
        tasks = [one.task for one in self._answers.values() if not one.task.done()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def episode(self, stop: StopReason, earned: float, prompt_text: str) -> Episode:
        """Return the record of the episode. `earned` is its reward."""
        paths = self._histories.trajectories
        if not paths:
            return without_verdict(NO_TOKENS, prompt_text, stop, "the policy gave no answer", RewardOutcome.SCORED)
        stops = [StopReason.COMPLETED] * (len(paths) - 1) + [stop]
        trajectories = [Trajectory(tuple(segments), why) for segments, why in zip(paths, stops, strict=True)]
        states = tuple(self._histories.states)
        return Episode(trajectories, RewardResult(earned), (0.0,) * len(states), states, dict(self.counts))

    def _check_open(self) -> None:
        if self._is_closed:
            raise refusal("session", "it has ended", "send no more requests", "not_found", GONE) from None

    def _abandon(self, identity: str) -> None:
        """Abort the sampling of a request, and forget the request, so that a later one is sampled anew."""
        self._answers.pop(identity).task.cancel()

    def _ended(self, one: _Asked, identity: str) -> None:
        """Handle the end of a request: a failed one may be repeated. Any error except a refusal ends the session."""
        if one.abandoning is not None:
            one.abandoning.cancel()
        error = None if one.task.cancelled() else one.task.exception()
        if (one.task.cancelled() or error is not None) and self._answers.get(identity) is one:
            del self._answers[identity]
        if isinstance(error, RequestRefused):
            self.refused = str(error)
        elif error is not None and not self._is_over.done():
            self._is_over.set_exception(error)
            self._is_over.exception()  # mark it as retrieved, because nobody may be waiting

    async def _sampled(self, asked: AgentRequest, turn: int) -> PolicyAnswer:
        with _as_refusal():
            characters = _characters([asked.messages, asked.tools])
            async with self._rendering:
                if (opening := await self._rendered(asked, characters)) is None:
                    return self._full(StopReason.CONTEXT_FULL)
                with one_conversation():
                    text = await _beside(characters, self._renderer.text, opening.given)
                room = self._bounds.sequence - len(opening.context)
                if room < 1:
                    return self._full(StopReason.CONTEXT_FULL, len(opening.context))
                self._histories.claim(opening)
            try:
                return await self._laid(opening, text, asked, turn, room)
            except BaseException:
                self._histories.give_up(opening)
                raise

    async def _rendered(self, asked: AgentRequest, characters: int) -> Opening | None:
        """Return the engine's input for a request of so many characters; None if they cannot fit. `_rendering` must be
        held. Raises TemplateFault.
        """
        if characters > self._bounds.sequence * self._renderer.longest_token:
            return None
        with one_conversation():
            return await _beside(characters, self._open, asked)

    def _open(self, asked: AgentRequest) -> Opening:
        inner = [self._with_inner_ids(message) for message in asked.messages]
        return self._histories.open(asked.messages, inner, asked.tools)

    async def _laid(self, opening: Opening, text: str, asked: AgentRequest, turn: int, room: int) -> PolicyAnswer:
        most = min(room, self._sampling.max_new_tokens, asked.max_tokens or room)
        sampling = replace(self._sampling, max_new_tokens=most, stop=(*self._sampling.stop, *asked.stop))
        seed = None if self._seed is None else turn_seed(self._seed, turn)
        async with aclosing(self._generator.generate(opening.context, sampling, seed, self._engine_session)) as answer:
            [completion] = [completion async for ended in answer for _, completion in ended]
        with one_conversation():
            parsed = self._renderer.parse(completion.token_ids, asked.tools)
        message, stop_text = self._outward(parsed, asked.stop), _stop_text(completion, asked.stop)
        self._histories.lay(opening, text, completion, message, named_calls(message))
        self.counts["tool_calls"] += len(message.get("tool_calls") or ())
        self.counts[TOOL_ERRORS] += len(parsed.malformed)
        self.last = message
        if completion.finish_reason is FinishReason.ABORT:
            self._end(StopReason.ABORTED)
        else:
            self.stop = self._why(completion, most, room)
        counts = len(opening.context), len(completion.token_ids)
        answer = self._answer(message, finish_of(completion, message), *counts)
        return replace(answer, stop_text=stop_text, cached_tokens=completion.cached_tokens)

    def _why(self, completion: Completion, most: int, room: int) -> StopReason:
        """Return why the episode ends if this is its last answer. A cut at the agent's `max_tokens` is complete."""
        if completion.finish_reason is not FinishReason.LENGTH or most < min(room, self._sampling.max_new_tokens):
            return StopReason.COMPLETED
        return StopReason.LENGTH if room >= self._sampling.max_new_tokens else StopReason.CONTEXT_FULL

    def _full(self, stop: StopReason, prompt_tokens: int = 0) -> PolicyAnswer:
        """Return an empty answer with the finish reason `length`.

        After MAX_TURNS no more answers are possible. After CONTEXT_FULL they are, because a shorter conversation may
        follow.
        """
        if stop is StopReason.MAX_TURNS:
            self._end(stop)
        else:
            self.stop = stop
        return self._answer(NOTHING, "length", prompt_tokens, 0)

    def _end(self, stop: StopReason) -> None:
        self.stop = stop
        if not self._is_over.done():
            self._is_over.set_result(None)

    def _answer(self, message: Message, finish: str, prompt_tokens: int, completion_tokens: int) -> PolicyAnswer:
        return PolicyAnswer(uuid.uuid4().hex, int(self._clock()), message, finish, prompt_tokens, completion_tokens)

    def _outward(self, parsed: Parsed, stop: Sequence[str]) -> Message:
        """Return the message for the agent: new call ids, malformed calls as text, text up to a stop string."""
        content = "\n".join(part for part in (parsed.message.get("content") or "", *parsed.malformed) if part)
        ends = [at for text in stop if (at := content.find(text)) >= 0]
        message: dict[str, Any] = {**parsed.message, "content": content[: min(ends, default=None)]}
        if "tool_calls" in message:
            message["tool_calls"] = [self._named(call) for call in message["tool_calls"]]
        return message

    def _named(self, call: Mapping[str, Any]) -> dict[str, Any]:
        outward = f"call{len(self._inner_ids):05d}"  # nine letters and digits, as Mistral's templates require
        self._inner_ids[outward] = call["id"]
        return {**call, "id": outward}

    def _with_inner_ids(self, message: Message) -> Message:
        """Return a message with the renderer's ids for the calls that it makes or answers."""
        known = self._inner_ids
        if "tool_call_id" in message:
            message = {**message, "tool_call_id": known.get(message["tool_call_id"], message["tool_call_id"])}
        if message.get("tool_calls"):
            message = {
                **message,
                "tool_calls": [{**call, "id": known.get(call["id"], call["id"])} for call in message["tool_calls"]],
            }
        return message


@contextmanager
def _as_refusal() -> Iterator[None]:
    """Refuse the request if the chat template cannot express its messages."""
    try:
        yield
    except TemplateFault as fault:
        problem = f"the model's chat template rejects them: {fault}"
        raise refusal("messages", problem, "send messages that the template can express", "not_supported") from fault


async def _beside(characters: int, work: Callable[[A], T], given: A) -> T:
    """Return `work(given)`, run in a thread if it concerns long text, so that the other sessions go on meanwhile."""
    return await asyncio.to_thread(work, given) if characters > SHORT_CHARACTERS else work(given)


def _characters(value: Any) -> int:
    """Return the characters of all texts in a value."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(len(key) + _characters(one) for key, one in value.items())
    return sum(map(_characters, value)) if isinstance(value, Sequence) else 0


def finish_of(completion: Completion, message: Message) -> str:
    """Return OpenAI's `finish_reason` of an answer."""
    if completion.finish_reason is not FinishReason.STOP:
        return "length"
    return "tool_calls" if message.get("tool_calls") else "stop"


def _stop_text(completion: Completion, stop: Sequence[str]) -> str | None:
    """Return the agent's stop string that ended an answer; None if it ended otherwise."""
    if completion.finish_reason is not FinishReason.STOP:
        return None
    found = [(at, text) for text in stop if (at := completion.text.find(text)) >= 0]
    return min(found)[1] if found else None
