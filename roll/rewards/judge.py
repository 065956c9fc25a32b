"""A judge: asks a model about each response and reads the verdict in its answer. Repeated questions are answered from memory."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Protocol

from roll.rewards.answers import ground_truth
from roll.rewards.judging import AnswerPattern, JudgeTemplate, verdict
from roll.types import Metrics, Prompt, RewardOutcome, RewardResult

ANSWERS_KEPT = 1 << 16
"""Number of a domain's latest answers in memory."""


@dataclass(frozen=True)
class Reply:
    """Result of one call of a model."""

    answers: tuple[str, ...] = ()
    """As many answers as requested, or none if the model could not be reached."""
    prompt_tokens: int = 0
    answer_tokens: int = 0
    failure: str = ""
    """Why there is no answer."""


class Chat(Protocol):
    """A model that answers a user's message."""

    async def ask(self, message: str) -> Reply:
        """Return the model's answers. If the model cannot be reached, the reply has a `failure`."""
        ...


class Judge:
    """The verdicts of one domain. For use from one asyncio event loop."""

    def __init__(
        self, template: JudgeTemplate, pattern: AnswerPattern, chat: Chat, question: Callable[[Prompt], str], failed_value: float
    ) -> None:
        """
        Args:
            chat: one model with one way of sampling: a message has one reply.
            question: what the policy was asked, as text.
            failed_value: of a response without a verdict.
        """
        self._template, self._pattern, self._chat = template, pattern, chat
        self._question, self._failed_value = question, failed_value
        self._replies: OrderedDict[bytes, asyncio.Task[Reply]] = OrderedDict()
        self._counts = dict.fromkeys(("asked", "remembered", "unavailable", "prompt_tokens", "answer_tokens"), 0)

    async def score(self, prompt: Prompt, responses: Sequence[str]) -> list[RewardResult]:
        """Return one result for each response, in order. All are judged concurrently.

        UNPARSABLE where the answer cannot be read, UNAVAILABLE where there is none. A row without the reference answer that the
        template needs is CRASHED.

        Raises:
            RollError: what the model's group raised.
        """
        try:
            reference = ground_truth(prompt.row) if self._template.needs_reference else ""
        except ValueError as error:
            return [self._failed(RewardOutcome.CRASHED, f"the judge's template needs a reference answer: {error}")] * len(responses)
        question = self._question(prompt)
        messages = [self._template.filled(question, response, reference) for response in responses]
        return list(await asyncio.gather(*map(self._verdict, messages)))

    async def _verdict(self, message: str) -> RewardResult:
        reply = await self._reply(message)
        if reply.failure:
            self._counts["unavailable"] += 1
            return self._failed(RewardOutcome.UNAVAILABLE, reply.failure)
        result = verdict(reply.answers, self._pattern)
        return result if result.outcome == RewardOutcome.SCORED else self._failed(result.outcome, result.note)

    async def _reply(self, message: str) -> Reply:
        """Return the model's reply, or its present or earlier reply to the same message. Failures are not remembered."""
        key = sha256(message.encode()).digest()
        task = self._replies.get(key)
        if task is not None:
            self._counts["remembered"] += 1
            self._replies.move_to_end(key)
            return await asyncio.shield(task)
        self._replies[key] = task = asyncio.create_task(self._asked(key, message))
        if len(self._replies) > ANSWERS_KEPT:
            self._replies.popitem(last=False)
        return await asyncio.shield(task)

    async def _asked(self, key: bytes, message: str) -> Reply:
        self._counts["asked"] += 1
        kept = False
        try:
            reply = await self._chat.ask(message)
            kept = not reply.failure
        finally:
            if not kept:
                self._replies.pop(key, None)
        self._counts["prompt_tokens"] += reply.prompt_tokens
        self._counts["answer_tokens"] += reply.answer_tokens
        return reply

    def _failed(self, outcome: RewardOutcome, note: str) -> RewardResult:
        return RewardResult(self._failed_value, outcome, note=note)

    def take_counts(self) -> Metrics:
        """Return counts since the last call: `asked`, `remembered`, `unavailable`, `prompt_tokens` and `answer_tokens`."""
        counts = {name: float(count) for name, count in self._counts.items()}
        self._counts = dict.fromkeys(self._counts, 0)
        return counts
