"""LLM as a judge: queries a model about each response and parses the verdict from its answer. Repeated queries are
cached.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Protocol

from roll.rewards.answers import ground_truth
from roll.rewards.judges.judging import AnswerPattern, JudgeTemplate, judges_verdict
from roll.types import Metrics, Prompt, RewardOutcome, RewardResult

ANSWERS_KEPT = 1 << 16
"""Largest number of cached replies of a domain."""


@dataclass(frozen=True)
class JudgeReply:
    """Result of one call of the judge's model."""

    answers: tuple[str, ...] = ()
    """The sampled answers. Empty if the call failed."""
    prompt_tokens: int = 0
    answer_tokens: int = 0
    failure: str = ""
    """Why the call failed; empty if it succeeded."""


class Chat(Protocol):
    """A model that answers a user message."""

    async def ask(self, message: str) -> JudgeReply:
        """Return the model's reply. A failure is reported in `Reply.failure`, not raised."""
        ...


class Judge:
    """Judges the responses of one domain. Must be used from a single asyncio event loop."""

    def __init__(
        self,
        template: JudgeTemplate,
        pattern: AnswerPattern,
        chat: Chat,
        question: Callable[[Prompt], str],
        failed_value: float,
    ) -> None:
        """
        Args:
            chat: the judge's model. Its sampling settings must not change, because replies are cached by message.
            question: returns the question that a prompt put to the policy, as text.
            failed_value: value of a result without a verdict.
        """
        self._template, self._pattern, self._chat = template, pattern, chat
        self._question, self._failed_value = question, failed_value
        self._replies: OrderedDict[bytes, asyncio.Task[JudgeReply]] = OrderedDict()
        self._counts = dict.fromkeys(("asked", "remembered", "unavailable", "prompt_tokens", "answer_tokens"), 0)

    async def score(self, prompt: Prompt, responses: Sequence[str]) -> list[RewardResult]:
        """Return one result for each response, in order. All are judged concurrently.

        The outcome is UNPARSABLE if the judge's answer cannot be parsed, and UNAVAILABLE if the call of the model
        failed. It is CRASHED if the template needs a reference answer and the row has none.

        Raises:
            RollError: the workers of the judge's model failed.
        """
        try:
            reference = ground_truth(prompt.row) if self._template.needs_reference else ""
        except ValueError as error:
            return [
                self._failed(RewardOutcome.CRASHED, f"the judge's template needs a reference answer: {error}")
            ] * len(responses)
        question = self._question(prompt)
        messages = [self._template.filled(question, response, reference) for response in responses]
        return list(await asyncio.gather(*map(self._verdict, messages)))

    async def _verdict(self, message: str) -> RewardResult:
        reply = await self._reply(message)
        if reply.failure:
            self._counts["unavailable"] += 1
            return self._failed(RewardOutcome.UNAVAILABLE, reply.failure)
        result = judges_verdict(reply.answers, self._pattern)
        return result if result.outcome == RewardOutcome.SCORED else self._failed(result.outcome, result.note)

    async def _reply(self, message: str) -> JudgeReply:
        """Return the model's reply. A message that was sent before, or is in flight, is not sent again. Failures are
        not cached.
        """
        key = sha256(message.encode()).digest()
        task = self._replies.get(key)
        if task is not None:
            self._counts["remembered"] += 1
            self._replies.move_to_end(key)
            return await asyncio.shield(task)
        self._replies[key] = task = asyncio.create_task(self._answer_of(key, message))
        if len(self._replies) > ANSWERS_KEPT:
            self._replies.popitem(last=False)
        return await asyncio.shield(task)

    async def _answer_of(self, key: bytes, message: str) -> JudgeReply:
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

    def reset_counts(self) -> Metrics:
        """Return and reset the counts since the last call.

        They are `asked` (calls of the model), `remembered` (cache hits), `unavailable`, `prompt_tokens` and
        `answer_tokens`.
        """
        counts = {name: float(count) for name, count in self._counts.items()}
        self._counts = dict.fromkeys(self._counts, 0)
        return counts
