"""A simulated engine, environments and a chat format for tests of episodes.

A message is written `role:content|`. A turn of the policy begins with `assistant:` and ends with `|`. In it,
`!name(text)` is a tool call, and `!name` without brackets is a malformed one. Each byte is a token.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from roll.agents.environments.base import MalformedCalls, Message, Observation, Step
from roll.agents.episode_groups import TRAINING, EpisodeGroups
from roll.agents.episodes import EpisodeLimits, Episodes, TokenLimits
from roll.agents.partners import Partners
from roll.data.renderers.base import Parsed
from roll.rollout.group import Scorer
from roll.types import Completion, FinishReason, Ints, NumberedCompletions, Prompt, RewardResult, Sampling, Session
from tests import limits
from tests.unit.rollout.build import EachByItself

END = ord("|")
DOMAIN = "world"
LATE = 10.0
"""Deadline of an episode, in seconds of virtual time."""


def tokens(text: str) -> Ints:
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)


def text(token_ids: Ints) -> str:
    return bytes(token_ids.tolist()).decode()


class Chat:
    """Implements `ChatRenderer`."""

    stop_token_ids = frozenset({END})
    longest_token = 100

    def __init__(self, has_bridge: bool = True) -> None:
        self._has_bridge = has_bridge

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> Ints:
        return tokens("".join(f"{one['role']}:{one['content']}|" for one in messages) + "assistant:")

    def bridge(
        self, before: Ints, sampled: Ints, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
    ) -> Ints | None:
        closed = len(sampled) and sampled[-1] == END
        return (
            np.concatenate([tokens("" if closed else "|"), self.render(messages, tools)]) if self._has_bridge else None
        )

    def parse(self, sampled: Ints, tools: Sequence[Mapping[str, Any]]) -> Parsed:
        said = text(sampled).removesuffix("|")
        calls = [
            {
                "id": str(number),
                "type": "function",
                "function": {"name": name, "arguments": json.dumps({"text": given})},
            }
            for number, (name, given) in enumerate(re.findall(r"!(\w+)\((.*?)\)", said))
        ]
        unreadable = tuple(re.findall(r"!\w+(?![\w(])", said))
        return Parsed({"role": "assistant", "content": said} | ({"tool_calls": calls} if calls else {}), unreadable)

    def text(self, token_ids: Ints) -> str:
        return text(token_ids)


@dataclass
class Request:
    """A request to the engine."""

    context: str
    sampling: Sampling
    seed: int | None
    session: Session | None


@dataclass
class Engine:
    """Answers a context with `says(context)` after `takes` seconds of the loop's time. Each answer increases the policy
    version by one.
    """

    says: Callable[[str], str]
    version: int = 0
    takes: float = 1.0
    aborts: bool = False
    requests: list[Request] = field(default_factory=list)
    cached: int = 0
    """Number of cached tokens that each answer tells."""
    cancelled: int = 0
    """Number of requests that were cancelled before they were answered."""

    async def generate(
        self,
        token_ids: Ints,
        sampling: Sampling,
        seed: int | None = None,
        session: Session | None = None,
        shown: object = None,
    ) -> AsyncGenerator[NumberedCompletions, None]:
        self.requests.append(Request(text(token_ids), sampling, seed, session))
        try:
            await asyncio.sleep(self.takes)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        ids = tokens(f"{self.says(text(token_ids))}|")[: sampling.max_new_tokens]
        reason = (
            FinishReason.ABORT
            if self.aborts
            else FinishReason.STOP
            if ids[-1] in sampling.stop_token_ids
            else FinishReason.LENGTH
        )
        log_probs = -ids.astype(np.float32) if sampling.log_probs else None
        versions, said = np.full(len(ids), self.version, np.int32), text(ids).removesuffix("|")
        yield [(0, Completion(ids, log_probs, versions, reason, said, cached_tokens=self.cached))]
        self.version += 1


@dataclass
class World:
    """An environment that returns the given answers, one per turn of the policy or of a partner.

    `takes` is the duration of a step in seconds.
    """

    answers: Sequence[Step | Exception]
    observation: Observation = field(default_factory=lambda: Observation([{"role": "user", "content": "go"}]))
    malformed_calls: MalformedCalls = "answer"
    takes: float = 0.0
    heard: list[Message] = field(default_factory=list)
    partners: list[tuple[str, str]] = field(default_factory=list)
    """Turns of partners that it received: name and text."""
    closed: int = 0

    async def step(self, message: Message) -> Step:
        self.heard.append(message)
        return await self._next()

    async def hear(self, partner: str, text: str) -> Step:
        self.partners.append((partner, text))
        return await self._next()

    async def _next(self) -> Step:
        await asyncio.sleep(self.takes)
        answer = self.answers[len(self.heard) + len(self.partners) - 1]
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def close(self) -> None:
        self.closed += 1


@dataclass
class Worlds:
    """Implements `Environments`: calls `make` for each environment."""

    make: Callable[[], World | Exception]
    opened: list[World] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)

    async def open(self, domain: str, row: Mapping[str, Any], seed: int) -> World:
        self.seeds.append(seed)
        world = self.make()
        if isinstance(world, Exception):
            raise world
        self.opened.append(world)
        return world


class Judge(EachByItself):
    """Rewards each response with its number of characters."""

    async def score(self, prompt: Prompt, responses: Sequence[str]) -> Sequence[RewardResult]:
        return [RewardResult(float(len(response))) for response in responses]


def task(number: int = 0, seed: int | None = None) -> Prompt:
    row: dict[str, Any] = {"number": number} if seed is None else {"seed": seed}
    return Prompt(number, np.zeros(0, np.int32), "", DOMAIN, row)


def episodes(
    worlds: Worlds,
    engine: Engine,
    chat: Chat | None = None,
    max_turns: int = 4,
    attempts: int = 2,
    response: int = 20,
    sequence: int = 1000,
    prompt: int = 100,
    log_probs: bool = True,
    seconds: float = limits.CALL,
    partners: Partners | None = None,
) -> Episodes:
    bounds = {DOMAIN: EpisodeLimits(max_turns, seconds, attempts)}
    sampling, longest = Sampling(response, log_probs=log_probs), TokenLimits(prompt, sequence)
    clock = asyncio.get_running_loop().time
    return Episodes(worlds, engine, chat or Chat(), sampling, bounds, longest, clock, partners)


def groups(player: Episodes, samples: int = 2, log_probs: bool = True, scorer: Scorer | None = None) -> EpisodeGroups:
    judged = frozenset({DOMAIN}) if scorer else frozenset[str]()
    return EpisodeGroups(
        player, Sampling(20, samples=samples, log_probs=log_probs), 7, TRAINING, scorer or Judge(), judged
    )
