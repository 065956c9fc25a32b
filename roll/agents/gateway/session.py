"""A session: the policy answers the requests of one agent in one episode, and the exact tokens are recorded."""

from __future__ import annotations

import asyncio
import uuid
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from roll.agents.environments.base import TOOL_ERRORS
from roll.agents.episodes import NO_TOKENS, SessionGenerator, calls_of
from roll.agents.gateway.asked import Answer, Asked, Message, Refused, refusal
from roll.agents.gateway.histories import Histories, Opening
from roll.data.chat import TemplateFault
from roll.data.renderers.base import ChatRenderer, Parsed
from roll.rollout.group import turn_seed
from roll.rollout.transcript import without_verdict
from roll.types import Completion, Episode, FinishReason, RewardOutcome, RewardResult, Sampling, Session, StopReason, Trajectory

GONE = 410
NOTHING: Message = {"role": "assistant", "content": ""}


@dataclass(frozen=True)
class SessionBounds:
    """Limits of one episode."""

    requests: int
    """Largest number of requests, including those that are too long to be answered."""
    sequence: int
    """Largest number of tokens of a trajectory."""


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
    ) -> None:
        """
        Args:
            sampling: sampling settings of an answer.
            seed: seed of the sampling. None leaves the random state to the engine.
            clock: returns the Unix time in seconds.
        """
        self._generator, self._renderer, self._bounds, self._seed, self._clock = generator, renderer, bounds, seed, clock
        stops = tuple(sorted({*sampling.stop_token_ids, *renderer.stop_token_ids}))
        self._sampling = replace(sampling, samples=1, stop_token_ids=stops)
        self._histories, self._engine_session = Histories(renderer), Session()
        self._answers: dict[str, asyncio.Task[Answer]] = {}
        self._inner_ids: dict[str, str] = {}
        self._requests = 0
        self._is_closed = False
        self._is_over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.counts: defaultdict[str, float] = defaultdict(float)
        """Metrics of the episode, by name."""
        self.last: Message | None = None
        """The policy's last message."""
        self.stop = StopReason.COMPLETED
        """Why the episode ends, if the agent makes no more requests."""
        self.refused = ""
        """The last refusal; empty if there was none."""

    async def answer(self, asked: Asked, identity: str) -> Answer:
        """Return the policy's answer. Requests with the same `identity` share one answer, even if the first caller stopped waiting.

        Raises:
            Refused: the session has ended, or the chat template cannot express the messages.
            RollError: the engine failed.
        """
        if self._is_closed:
            raise refusal("session", "it has ended", "send no more requests", GONE)
        if (task := self._answers.get(identity)) is None:
            if self._requests >= self._bounds.requests:
                return self._full(StopReason.MAX_TURNS)
            self._requests += 1
            task = self._answers[identity] = asyncio.create_task(self._sampled(asked, self._requests - 1))
            task.add_done_callback(lambda done: self._failed(done, identity))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if self._is_closed and task.cancelled():
                raise refusal("session", "it has ended", "send no more requests", GONE) from None
            raise

    async def over(self) -> None:
        """Wait until no more answers are possible. `stop` then has the reason.

        Raises:
            RollError: the engine failed.
        """
        await asyncio.shield(self._is_over)

    async def close(self) -> None:
        """Cancel all sampling, and refuse all further requests."""
        self._is_closed = True
        tasks = [task for task in self._answers.values() if not task.done()]
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

    def _failed(self, task: asyncio.Task[Answer], identity: str) -> None:
        """Handle the end of a request: a failed one may be repeated. Any error except a refusal ends the session."""
        error = None if task.cancelled() else task.exception()
        if task.cancelled() or error is not None:
            del self._answers[identity]
        if isinstance(error, Refused):
            self.refused = str(error)
        elif error is not None and not self._is_over.done():
            self._is_over.set_exception(error)
            self._is_over.exception()  # mark it as retrieved, because nobody may be waiting

    async def _sampled(self, asked: Asked, turn: int) -> Answer:
        inner = [self._with_inner_ids(message) for message in asked.messages]
        try:
            opening = self._histories.open(asked.messages, inner, asked.tools)
        except TemplateFault as fault:
            problem = f"the model's chat template rejects them: {fault}"
            raise refusal("messages", problem, "send messages that the template can express") from fault
        room = self._bounds.sequence - len(opening.context)
        if room < 1:
            self._histories.give_up(opening)
            return self._full(StopReason.CONTEXT_FULL, len(opening.context))
        try:
            return await self._laid(opening, asked, turn, room)
        except BaseException:
            self._histories.give_up(opening)
            raise

    async def _laid(self, opening: Opening, asked: Asked, turn: int, room: int) -> Answer:
        most = min(room, self._sampling.max_new_tokens, asked.max_tokens or room)
        sampling = replace(self._sampling, max_new_tokens=most, stop=(*self._sampling.stop, *asked.stop))
        seed = None if self._seed is None else turn_seed(self._seed, turn)
        async with aclosing(self._generator.generate(opening.context, sampling, seed, self._engine_session)) as answer:
            [completion] = [completion async for ended in answer for _, completion in ended]
        parsed = self._renderer.parse(completion.token_ids, asked.tools)
        message = self._outward(parsed, asked.stop)
        self._histories.lay(opening, completion, message, calls_of(message))
        self.counts["tool_calls"] += len(message.get("tool_calls") or ())
        self.counts[TOOL_ERRORS] += len(parsed.malformed)
        self.last = message
        if completion.finish_reason is FinishReason.ABORT:
            self._end(StopReason.ABORTED)
        else:
            self.stop = self._why(completion, most, room)
        return self._answer(message, finish_of(completion, message), len(opening.context), len(completion.token_ids))

    def _why(self, completion: Completion, most: int, room: int) -> StopReason:
        """Return why the episode ends if this is its last answer. An answer cut at the agent's own `max_tokens` counts as complete."""
        if completion.finish_reason is not FinishReason.LENGTH or most < min(room, self._sampling.max_new_tokens):
            return StopReason.COMPLETED
        return StopReason.LENGTH if room >= self._sampling.max_new_tokens else StopReason.CONTEXT_FULL

    def _full(self, stop: StopReason, prompt_tokens: int = 0) -> Answer:
        """Return an empty answer with the finish reason `length`.

        After MAX_TURNS no more answers are possible. After CONTEXT_FULL they are, because a shorter conversation may follow.
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

    def _answer(self, message: Message, finish: str, prompt_tokens: int, completion_tokens: int) -> Answer:
        return Answer(uuid.uuid4().hex, int(self._clock()), message, finish, prompt_tokens, completion_tokens)

    def _outward(self, parsed: Parsed, stop: Sequence[str]) -> Message:
        """Return the message for the agent: calls have new ids, malformed calls become text, and the text ends before a stop string."""
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
            message = {**message, "tool_calls": [{**call, "id": known.get(call["id"], call["id"])} for call in message["tool_calls"]]}
        return message


def finish_of(completion: Completion, message: Message) -> str:
    """Return OpenAI's `finish_reason` of an answer."""
    if completion.finish_reason is not FinishReason.STOP:
        return "length"
    return "tool_calls" if message.get("tool_calls") else "stop"
