"""Partners of environments: other policies, which an environment asks for a turn. Their tokens are never trained on.

    policy ──message──▶ environment ──messages──▶ partner
    policy ◀─messages── environment ◀────text────┘

The policy sees a partner's turn only through the environment's messages, whose tokens have no loss. A partner is
a fixed model, a model behind a URL, or the policy in training itself, which then samples these turns without credit
(live_partner.py).
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from roll.agents.environments.base import Ask, Message
from roll.config.derived.domains import ENVIRONMENTS
from roll.config.derived.fixed_roles import PARTNERS
from roll.engines.actor_infer import Span, unrecorded
from roll.errors import EnvironmentFailed
from roll.rewards.answers import after_thinking
from roll.rewards.judges.judge import JudgeReply
from roll.rewards.judges.reward_models import ApiJudge, JudgeEngines, engine_reply
from roll.types import Ints, Metrics, Sampling

COUNTED = ("asked", "unavailable", "cut", "prompt_tokens", "answer_tokens")


class Partner(Protocol):
    """Another policy."""

    async def reply(self, messages: Sequence[Message], seed: int | None) -> JudgeReply:
        """Return one answer to a conversation, or why there is none. With a seed, engines sample reproducibly."""
        ...


@dataclass(frozen=True)
class ApiPartner:
    """A `Partner` behind a URL. It gets no seed."""

    model: ApiJudge

    async def reply(self, messages: Sequence[Message], seed: int | None) -> JudgeReply:
        return await self.model.converse(messages)


class EnginePartner:
    """A `Partner` that the run itself serves, with constant weights. For use from one event loop."""

    def __init__(
        self, engines: JudgeEngines, encode: Callable[[Sequence[Message]], Ints], sampling: Sampling, context: int
    ) -> None:
        """
        Args:
            encode: returns the model's input tokens for a conversation. Raises ValueError if its chat template rejects
                it.
            context: largest number of tokens of a conversation and its answer.
        """
        self._engines, self._encode, self._sampling, self._context = engines, encode, sampling, context
        self._encodes = asyncio.Lock()  # tokenizers are not thread-safe

    async def reply(self, messages: Sequence[Message], seed: int | None) -> JudgeReply:
        try:
            async with self._encodes:
                token_ids = await asyncio.to_thread(self._encode, messages)
        except ValueError as error:
            return JudgeReply(failure=f"its chat template rejects the messages: {error}")
        return await engine_reply(self._engines, token_ids, self._sampling, self._context, seed, "partner")


@dataclass(frozen=True)
class Partners:
    """The partners of all domains. For use from one event loop."""

    known: Mapping[tuple[str, str], Partner] = field(default_factory=dict)
    """Partners by domain and name."""
    span: Span = unrecorded
    """Records each turn; see `Trace.span`."""
    counts: defaultdict[tuple[str, str], Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    """Counts since the last call of `metrics`. Copies made by `beside` share them."""

    def beside(self, others: Mapping[tuple[str, str], Partner]) -> Partners:
        """Return these partners and others, with common counts."""
        return replace(self, known={**self.known, **others})

    async def answer(self, domain: str, ask: Ask, seed: int | None) -> str:
        """Return a partner's turn, without its thinking.

        Raises:
            EnvironmentFailed: there is no such partner, or it gave no answer.
            RollError: the workers of the partner's model failed.
        """
        key = (domain, ask.partner)
        if key not in self.known:
            names = ", ".join(name for its, name in self.known if its == domain) or "none"
            place = f"{ENVIRONMENTS}{domain}{PARTNERS[:-1]}"
            raise EnvironmentFailed(f"the environment asks the partner '{ask.partner}', but {place} has {names}")
        counts = self.counts[key]
        counts["asked"] += 1
        with self.span(f"{ENVIRONMENTS}{domain}{PARTNERS}{ask.partner}", "answer", messages=len(ask.messages)):
            reply = await self.known[key].reply(ask.messages, seed)
        if reply.failure:
            counts["unavailable"] += 1
            raise EnvironmentFailed(f"the partner '{ask.partner}' gave no answer: {reply.failure}", "unavailable")
        counts["cut"] += reply.cut
        counts["prompt_tokens"] += reply.prompt_tokens
        counts["answer_tokens"] += reply.answer_tokens
        return after_thinking(reply.answers[0])

    def metrics(self) -> Metrics:
        """Return and reset the counts of all partners, those of `beside` included once they were asked."""
        keys = sorted({*self.known, *self.counts})
        metrics = {
            f"partner/{domain}/{name}/{count}": float(self.counts[domain, name][count])
            for domain, name in keys
            for count in COUNTED
        }
        self.counts.clear()
        return metrics
