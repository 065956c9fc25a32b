"""Episodes of several turns: the policy acts in an environment, token in, token out.

    environment ──messages──▶ renderer ──tokens──▶ engine ──tokens──▶ renderer ──message──▶ environment
                                 ▲                                       │
                                 └──── what was sampled stays as it is ◀─┘

The engine always continues from exactly the tokens that it saw and sampled. The renderer converts only the
environment's new messages into tokens to append; it does not render earlier turns again. If that is not possible, the
context forks (`Transcript`).
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any, Protocol

import numpy as np

from roll.agents.environments.base import TOOL_ERRORS, Ask, MalformedCalls, Message, Observation, Step
from roll.agents.partners import Partners
from roll.agents.sight import EpisodeSight, GivenTokens, SeenMessages, SeenPicture, row_with_files, told_text
from roll.data.chat import TemplateFault
from roll.data.renderers.base import ChatRenderer, Parsed, one_conversation
from roll.errors import EnvironmentFailed, NeighbourFailed
from roll.rollout.group import turn_seed
from roll.rollout.record import Transcript, without_placeholder, without_verdict
from roll.types import (
    AskedPictures,
    Completion,
    Episode,
    FinishReason,
    Ints,
    Metrics,
    NumberedCompletions,
    Prompt,
    RewardOutcome,
    RolloutGroup,
    Sampling,
    Session,
    StopReason,
)

PARTNER_SECONDS = "partner_seconds"
ENVIRONMENT = "environment/"
"""Prefix of the names of metrics that an environment returns."""
UNREADABLE = "Error: this tool call cannot be read, and nothing was done: {}"
"""Answer to the policy's malformed tool calls. The placeholder is the call."""
MOST_DISTURBED = 10
"""Largest number of restarts of an episode after `NeighbourFailed`. Such restarts do not count as attempts."""
FAILURES = {
    "crashed": RewardOutcome.CRASHED,
    "timed_out": RewardOutcome.TIMED_OUT,
    "unavailable": RewardOutcome.UNAVAILABLE,
}
"""Reward outcome by the `reason` of `EnvironmentFailed`."""
MOST_ASKED = 64
"""Largest number of turns that an environment may ask of its partners between two turns of the policy."""
FIRST_PARTNER_SEED = 1 << 12
"""Number of the first partner's turn among the seeds of an episode's turns. Those of the policy are below."""


class EnvironmentSession(Protocol):
    """One environment, after its `reset`."""

    observation: Observation
    malformed_calls: MalformedCalls

    async def step(self, message: Message) -> Step:
        """Return the environment's answer to the policy's message. Raises EnvironmentFailed if it broke."""
        ...

    async def hear(self, partner: str, text: str) -> Step:
        """Return the environment's step after a partner's turn. Raises EnvironmentFailed if it broke."""
        ...

    async def close(self) -> None:
        """Close the environment. Never raises."""
        ...


class Environments(Protocol):
    """Provides environments."""

    async def open(self, domain: str, row: Mapping[str, Any], seed: int) -> EnvironmentSession:
        """Return a fresh environment of the domain after its `reset`. Raises EnvironmentFailed if none opens."""
        ...


class SessionGenerator(Protocol):
    """A `Generator` that accepts a session, which identifies the requests of one episode."""

    def generate(
        self,
        token_ids: Ints,
        sampling: Sampling,
        seed: int | None = None,
        session: Session | None = None,
        shown: AskedPictures | None = None,
    ) -> AsyncGenerator[NumberedCompletions, None]:
        """See `Generator`. Requests of one session go to the same engine as long as it has room."""
        ...


@dataclass(frozen=True)
class EpisodeLimits:
    """Limits of the episodes of a domain."""

    max_turns: int
    seconds: float
    """Deadline of a whole attempt in seconds, from the first observation on, including generation."""
    attempts: int
    """Largest number of attempts at an episode if its environment breaks."""


@dataclass(frozen=True)
class TokenLimits:
    """Limits of a trajectory, in tokens."""

    prompt: int
    """Limit of the first observation."""
    sequence: int
    """Limit of the whole trajectory."""


class Player(Protocol):
    """Plays episodes of some domains."""

    async def play(self, prompt: Prompt, environment_seed: int, seed: int | None) -> Episode:
        """Play one episode. Its stop reason may be ENVIRONMENT_FAILED.

        Args:
            environment_seed: seed of the environment, the same for all episodes that are compared with each other.
            seed: seed of the sampled tokens; with None the engine chooses.
        """
        ...


class Episodes:
    """Implements `Player`: messages of the policy and steps of the environment alternate."""

    def __init__(
        self,
        environments: Environments,
        generator: SessionGenerator,
        renderer: ChatRenderer,
        sampling: Sampling,
        limits: Mapping[str, EpisodeLimits],
        tokens: TokenLimits,
        clock: Callable[[], float] = time.monotonic,
        partners: Partners | None = None,
        sight: EpisodeSight | None = None,
    ) -> None:
        """
        Args:
            sampling: sampling parameters of one turn.
            limits: limits of the episodes, by domain.
            tokens: limits of each trajectory.
            clock: returns the time in seconds.
            partners: the other policies that environments may ask.
            sight: how the policy sees pictures. None: it sees none.
        """
        self._partners, self._sight = partners or Partners(), sight
        self._environments, self._generator, self._renderer = environments, generator, renderer
        unwritable = sight.unwritable if sight else ()
        stops = tuple(sorted({*sampling.stop_token_ids, *renderer.stop_token_ids, *unwritable}))
        self._sampling = replace(sampling, samples=1, stop_token_ids=stops)
        self._limits, self._tokens, self._clock = limits, tokens, clock

    async def play(self, prompt: Prompt, environment_seed: int, seed: int | None) -> Episode:
        limits = self._limits[prompt.domain]
        return await attempted(
            partial(self._attempt, prompt, environment_seed, seed, limits), limits.attempts, prompt.text
        )

    async def _attempt(self, prompt: Prompt, environment_seed: int, seed: int | None, limits: EpisodeLimits) -> Episode:
        began = self._clock()
        row = prompt.row
        if prompt.shown is not None:
            row = row_with_files(row, (await asyncio.to_thread(prompt.shown.asked)).files)
        session = await self._environments.open(prompt.domain, row, environment_seed)
        try:
            turns = _Turns(
                self._generator,
                self._renderer,
                self._sampling,
                self._tokens,
                session,
                partial(self._partners.answer, prompt.domain),
                self._clock,
                self._sight,
                f"environments.{prompt.domain}",
            )
            await turns.begin()
            turns.transcript.counts["environment_seconds"] += self._clock() - began
            stop = await self._in_time(turns, limits, seed)
        finally:
            await session.close()
        episode = turns.transcript.episode(stop)
        if stop is not StopReason.DEADLINE:
            return episode
        late = f"the episode took longer than episode_timeout, {limits.seconds:g} s"
        return replace(episode, reward=replace(episode.reward, note=late))

    async def _in_time(self, turns: _Turns, limits: EpisodeLimits, seed: int | None) -> StopReason:
        try:
            async with asyncio.timeout(limits.seconds) as deadline:
                return await turns.run(limits.max_turns, seed)
        except TemplateFault as fault:
            raise EnvironmentFailed(f"the chat template rejects the environment's messages: {fault}") from fault
        except TimeoutError:
            if not deadline.expired():
                raise
            return StopReason.DEADLINE


class _Turns:
    """One attempt at an episode, turn by turn."""

    def __init__(
        self,
        generator: SessionGenerator,
        renderer: ChatRenderer,
        sampling: Sampling,
        tokens: TokenLimits,
        environment: EnvironmentSession,
        partner_turn: Callable[[Ask, int | None], Awaitable[str]],
        clock: Callable[[], float],
        sight: EpisodeSight | None,
        place: str,
    ) -> None:
        """`place`: the path of the environment's block in the configuration."""
        self._generator, self._renderer, self._sampling, self._environment = generator, renderer, sampling, environment
        self._place = place
        self._partner_turn, self._partner_turns = partner_turn, 0
        self._limits, self._clock, self._session, self._sight = tokens, clock, Session(), sight
        self._ids: set[str] = set()
        self._tools = environment.observation.tools
        self._messages: list[Message] = []
        self._state = ""
        self._pictures: list[SeenPicture] = []
        """Those of all messages."""
        self._asked = NO_TOKENS
        """The context with a single placeholder for each picture."""
        self.transcript = Transcript()

    async def begin(self) -> None:
        """Start with the first observation.

        Raises EnvironmentFailed if it is too long, or the template rejects it, or a picture cannot be seen.
        """
        first = self._environment.observation
        seen = await self._seen(first.messages)
        self._messages += seen.messages
        self._pictures += seen.pictures
        self._state = state_of(first.state, seen.messages)
        try:
            with one_conversation():
                found = self._tokens(self._whole, seen.pictures)
        except TemplateFault as fault:
            raise EnvironmentFailed(
                f"the chat template rejects the environment's first observation: {fault}"
            ) from fault
        assert found is not None
        if len(found.token_ids) > self._limits.prompt:
            long = f"the environment's first observation has {len(found.token_ids)} tokens"
            raise EnvironmentFailed(f"{long}, more than prompt_length, which is {self._limits.prompt}")
        self._start(found)

    async def _seen(self, messages: Sequence[Message]) -> SeenMessages:
        """Return messages of the environment with their pictures, which are decoded in a thread."""
        if self._sight is None or all(isinstance(message.get("content"), str | None) for message in messages):
            return SeenMessages(list(messages), ())
        seen = await asyncio.to_thread(self._sight.read, messages)
        self.transcript.counts[TOOL_ERRORS] += seen.tool_errors
        return seen

    def _whole(self, renderer: ChatRenderer) -> Ints:
        return renderer.render(self._messages, self._tools)

    def _tokens(
        self, write: Callable[[ChatRenderer], Ints | None], pictures: Sequence[SeenPicture]
    ) -> GivenTokens | None:
        """Return the tokens that `write` renders, or None if `write` returns None. Raises TemplateFault."""
        if self._sight is not None:
            return self._sight.tokens(write, pictures)
        token_ids = write(self._renderer)
        return None if token_ids is None else GivenTokens(token_ids, token_ids)

    def _start(self, given: GivenTokens) -> None:
        """Start a trajectory with the tokens of all messages."""
        self.transcript.start(given.token_ids, self._renderer.text(given.asked_ids), names_of(self._pictures))
        self._show(given.asked_ids)

    def _show(self, asked: Ints) -> None:
        """Set the pictures of the trajectory, which are those of all messages. `asked` are its tokens so far."""
        self._asked = asked
        if self._sight is not None:
            self.transcript.shown = self._sight.shown(self.transcript.context, asked, tuple(self._pictures))

    async def run(self, max_turns: int, seed: int | None) -> StopReason:
        """Play all turns. Return the reason why the episode ended."""
        for turn in range(max_turns):
            room = self._limits.sequence - len(self.transcript.context)
            if room < 1:
                return StopReason.CONTEXT_FULL
            completion = await self._generated(
                min(room, self._sampling.max_new_tokens), None if seed is None else turn_seed(seed, turn)
            )
            with one_conversation():
                parsed = self._with_new_ids(self._renderer.parse(completion.token_ids, self._tools))
            self.transcript.act(completion, named_calls(parsed.message), self._state)
            self.transcript.counts["tool_calls"] += len(parsed.message.get("tool_calls") or ())
            self.transcript.counts[TOOL_ERRORS] += len(parsed.malformed)
            self._messages.append(parsed.message)
            if completion.finish_reason is FinishReason.ABORT:
                return StopReason.ABORTED
            if completion.finish_reason is FinishReason.LENGTH:
                return StopReason.LENGTH if room >= self._sampling.max_new_tokens else StopReason.CONTEXT_FULL
            step, seen = await self._answer(parsed, seed)
            self.transcript.earn(step.reward)
            if step.done:
                return StopReason.COMPLETED
            if turn + 1 < max_turns:
                self._check(parsed.message, seen.messages)
                if not self._go_on(completion.token_ids, seen):
                    return StopReason.CONTEXT_FULL
        return StopReason.MAX_TURNS

    def _check(self, said: Message, answer: Sequence[Message]) -> None:
        """Raise EnvironmentFailed if an answer of the environment leaves the policy no turn to take."""
        if problem := unanswerable(said, answer):
            remedy = "return a message of the user or of a tool, or done=True"
            raise EnvironmentFailed(f"{self._place}: {problem}, and the episode is not done: {remedy}")

    def _with_new_ids(self, parsed: Parsed) -> Parsed:
        """Return a parsed turn whose call ids are new in the episode. A renderer numbers those of each turn."""
        calls = []
        for call in parsed.message.get("tool_calls") or ():
            number, name = len(self._ids), str(call["id"])
            while name in self._ids:
                # Nine letters and digits, as Mistral's templates require.
                name, number = f"call{number:05d}", number + 1
            self._ids.add(name)
            calls.append({**call, "id": name})
        return replace(parsed, message={**parsed.message, "tool_calls": calls}) if calls else parsed

    async def _generated(self, most: int, seed: int | None) -> Completion:
        sampling = replace(self._sampling, max_new_tokens=most)
        transcript, asked = self.transcript, self.transcript.shown and self.transcript.shown.asked()
        async with aclosing(
            self._generator.generate(transcript.context, sampling, seed, self._session, shown=asked)
        ) as answer:
            [completion] = [completion async for ended in answer for _, completion in ended]
        for token in self._sight.unwritable if self._sight else ():
            completion = without_placeholder(completion, token)
        return completion

    async def _answer(self, parsed: Parsed, seed: int | None) -> tuple[Step, SeenMessages]:
        """Return the environment's answer to a message, after all turns of partners that it asks for, and what the
        policy sees of it.

        `malformed_calls` says how malformed calls are handled.
        """
        malformed = parsed.malformed
        if malformed and self._environment.malformed_calls == "answer":
            step = Step([{"role": "tool", "content": UNREADABLE.format(text)} for text in malformed])
            return step, SeenMessages(list(step.messages), ())
        if malformed and self._environment.malformed_calls == "end":
            return Step(done=True), SeenMessages([], ())
        message = {**parsed.message, "malformed": list(malformed)} if malformed else parsed.message
        step = await self._timed(self._environment.step(message))
        for _ in range(MOST_ASKED):
            if step.asks is None:
                break
            step = followed(step, await self._heard(step.asks, seed))
        if step.asks is not None:
            raise EnvironmentFailed(f"the environment asks partners more than {MOST_ASKED} times after one turn")
        for name, value in step.metrics.items():
            self.transcript.counts[name if name == TOOL_ERRORS else f"{ENVIRONMENT}{name}"] += value
        seen = await self._seen(step.messages)
        self._state = state_of(step.state, seen.messages)
        return step, seen

    async def _heard(self, ask: Ask, seed: int | None) -> Step:
        """Ask a partner, and return the environment's step after its turn."""
        began, counts = self._clock(), self.transcript.counts
        own = None if seed is None else turn_seed(seed, FIRST_PARTNER_SEED + self._partner_turns)
        self._partner_turns += 1
        text = await self._partner_turn(ask, own)
        counts[PARTNER_SECONDS] += self._clock() - began
        self.transcript.hear(ask.partner, text)
        return await self._timed(self._environment.hear(ask.partner, text))

    async def _timed(self, stepping: Awaitable[Step]) -> Step:
        began = self._clock()
        step = await stepping
        self.transcript.counts["environment_seconds"] += self._clock() - began
        return step

    def _go_on(self, sampled: Ints, seen: SeenMessages) -> bool:
        """Append the environment's answer to the context. Return False if it and one more token do not fit."""
        context = self.transcript.context
        before = context[: len(context) - len(sampled)]
        self._messages += seen.messages
        self._pictures += seen.pictures

        def bridge(renderer: ChatRenderer) -> Ints | None:
            return renderer.bridge(before, sampled, seen.messages, self._tools)

        with one_conversation():
            bridged = self._tokens(bridge, seen.pictures)
            whole = self._tokens(self._whole, self._pictures) if bridged is None else None
        if bridged is None:
            assert whole is not None
            if len(whole.token_ids) >= self._limits.sequence:
                return False
            self._start(whole)
            return True
        if len(bridged.token_ids) + len(context) >= self._limits.sequence:
            return False
        text = self._renderer.text(bridged.asked_ids)
        self.transcript.go_on(bridged.token_ids, text, names_of(seen.pictures))
        self._show(np.concatenate([self._asked, sampled, bridged.asked_ids], dtype=np.int32))
        return True


NO_TOKENS = np.zeros(0, np.int32)


async def attempted(attempt: Callable[[], Awaitable[Episode]], attempts: int, prompt_text: str) -> Episode:
    """Return the first attempt whose environment did not break, or else an episode with the stop reason
    ENVIRONMENT_FAILED.

    Args:
        attempt: plays the episode once.
        attempts: largest number of attempts. Attempts that end with `NeighbourFailed` do not count; at most
            MOST_DISTURBED are allowed.
        prompt_text: text of the prompt, for the record of a failed episode.
    """
    failed = disturbed = 0
    while True:
        try:
            episode = await attempt()
            return replace(episode, metrics={**episode.metrics, "retried": float(failed + disturbed)})
        except EnvironmentFailed as error:
            if isinstance(error, NeighbourFailed):
                disturbed += 1
            else:
                failed += 1
            if failed >= attempts or disturbed >= MOST_DISTURBED:
                return without_verdict(
                    NO_TOKENS, prompt_text, StopReason.ENVIRONMENT_FAILED, str(error), FAILURES[error.reason]
                )


def unanswerable(said: Message, answer: Sequence[Message]) -> str:
    """Return why the policy cannot go on after an answer to what it said; "" if it can.

    Messages of the assistant may be examples that the environment shows, unless they repeat the policy's own message or
    nothing follows them.
    """
    if not answer:
        return "step returned no message"
    if answer[-1].get("role") == "assistant":
        return "the last message that step returned is one of the assistant, whose turn comes next"
    own = [one for one in answer if one.get("role") == "assistant" and _words(one) == _words(said)]
    return "step returned the policy's own message, which is in the conversation already" if own else ""


def _words(message: Message) -> tuple[Any, list[Any]]:
    """Return what a message says and which calls it makes. Those of an environment may have any form."""
    content, calls = message.get("content") or "", message.get("tool_calls")
    made = [one.get("function") for one in calls if isinstance(one, Mapping)] if isinstance(calls, list) else []
    return content.strip() if isinstance(content, str) else content, made


def followed(step: Step, then: Step) -> Step:
    """Return a step that asked a partner, and the one after the partner's turn, as one answer to the policy."""
    names = {**step.metrics, **then.metrics}
    metrics = {name: step.metrics.get(name, 0.0) + then.metrics.get(name, 0.0) for name in names}
    messages = [*step.messages, *then.messages]
    return replace(then, messages=messages, reward=step.reward + then.reward, metrics=metrics)


def state_of(declared: str | None, messages: Sequence[Message]) -> str:
    """Return the state by which turns are compared: the one that the environment declares, or its messages' text and
    the names of their pictures.
    """
    return declared if declared is not None else "\n".join(map(told_text, messages))


def names_of(pictures: Iterable[SeenPicture]) -> tuple[str, ...]:
    """Return the names of pictures."""
    return tuple(picture.name for picture in pictures)


def named_calls(message: Message) -> list[dict[str, Any]]:
    """Return the name and the arguments of each of a message's tool calls."""
    return [
        {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
        for call in message.get("tool_calls") or ()
    ]


def episode_metrics(groups: Sequence[RolloutGroup]) -> Metrics:
    """Return metrics of the episodes played in environments, and the environments' own metrics by domain. Empty without
    environments.

    They cover turns, tokens, stop reasons, tool calls, forks, retries and the time spent in the environment.
    """
    played = [(group.prompt.domain, episode) for group in groups for episode in group.episodes if episode.turn_states]
    if not played:
        return {}
    episodes = [episode for _, episode in played]
    stops = Counter(episode.stop for episode in episodes)
    metrics = {
        "episode/turns_mean": fmean(len(episode.sampled) for episode in episodes),
        "episode/turns_max": float(max(len(episode.sampled) for episode in episodes)),
        "episode/tokens_mean": fmean(given_and_sampled(episode) for episode in episodes),
        "episode/forks": float(sum(len(episode.trajectories) - 1 for episode in episodes)),
        "episode/tool_calls": _mean(episodes, "tool_calls"),
        "episode/tool_errors": _mean(episodes, "tool_errors"),
        "episode/environment_seconds": _mean(episodes, "environment_seconds"),
        "episode/retried": sum(episode.metrics.get("retried", 0.0) for episode in episodes),
    }
    if any(PARTNER_SECONDS in episode.metrics for episode in episodes):
        metrics["episode/partner_turns"] = fmean(len(episode.partner_turns) for episode in episodes)
        metrics["episode/partner_seconds"] = _mean(episodes, PARTNER_SECONDS)
    for stop in StopReason:
        metrics[f"episode/{stop.value}_fraction"] = stops[stop] / len(episodes)
    for domain in sorted({domain for domain, _ in played}):
        own = [episode for its, episode in played if its == domain]
        named = {name for episode in own for name in episode.metrics if name.startswith(ENVIRONMENT)}
        for part in sorted(name.removeprefix(ENVIRONMENT) for name in named):
            metrics[f"environment/{domain}/{part}"] = _mean(own, f"{ENVIRONMENT}{part}")
    return metrics


def given_and_sampled(episode: Episode) -> int:
    """Return the number of given and sampled tokens of the longest trajectory."""
    return max(sum(len(segment.token_ids) for segment in path.segments) for path in episode.trajectories)


def _mean(episodes: Sequence[Episode], name: str) -> float:
    return fmean(episode.metrics.get(name, 0.0) for episode in episodes)
