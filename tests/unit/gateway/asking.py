"""Gateway sessions with the engine and the chat format of tests/unit/rollout/playing.py, and requests to them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from roll.agents.gateway.asked import AgentRequest, Message, PolicyAnswer
from roll.agents.gateway.session import AgentSession, SessionBounds
from roll.types import Episode, Sampling, StopReason
from tests.unit.rollout.playing import Chat, Engine, text

RESPONSE, SEQUENCE = 40, 400
NOW = 1234.5
USER: Message = {"role": "user", "content": "go"}


def session(
    engine: Engine,
    chat: Chat | None = None,
    requests: int = 10,
    sequence: int = SEQUENCE,
    response: int = RESPONSE,
    seed: int | None = 11,
) -> AgentSession:
    return AgentSession(
        engine, chat or Chat(), Sampling(response), SessionBounds(requests, sequence), seed, lambda: NOW
    )


def turns() -> Callable[[str], str]:
    """Return a policy that answers `turn N`, where N is the number of assistant turns in the context, including its
    own.
    """
    return lambda context: f"turn {context.count('assistant:')}"


async def ask(
    asked: AgentSession, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = (), **keys: Any
) -> PolicyAnswer:
    """Send one request, which is identified by its entire content."""
    return await asked.answer(
        AgentRequest(messages, tools, **keys), json.dumps([list(messages), list(tools), keys], default=str)
    )


def tool(identity: str, content: str) -> Message:
    return {"role": "tool", "tool_call_id": identity, "content": content}


def laid(episode: Episode) -> list[list[str]]:
    """Return the texts of the segments of each trajectory."""
    return [[text(segment.token_ids) for segment in path.segments] for path in episode.trajectories]


def record(asked: AgentSession) -> Episode:
    return asked.episode(StopReason.COMPLETED, 1.0, "prompt")


def check_exact(episode: Episode, engine: Engine) -> None:
    """Check that each answer of the engine is trained on once, after exactly the context that the engine received for
    it.
    """
    trained = []
    for path in episode.trajectories:
        ids = [segment.token_ids for segment in path.segments]
        for number, segment in enumerate(path.segments):
            if segment.sampled:
                trained.append(text(np.concatenate(ids[:number])))
                assert segment.log_probs is not None
                assert segment.log_probs.tolist() == (-segment.token_ids.astype(np.float32)).tolist()
    assert sorted(trained) == sorted(request.context for request in engine.requests)
    assert len(episode.sampled) == len(engine.requests) == len(episode.turn_states) == len(episode.turn_rewards)


async def given_up(waiting: asyncio.Task[PolicyAnswer]) -> None:
    """Cancel a request, as a client does that hangs up."""
    waiting.cancel()
    with suppress(asyncio.CancelledError):
        await waiting
