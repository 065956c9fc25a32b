"""LLM as a judge: queries a model about each response and parses its verdict. Repeated queries are cached."""

from __future__ import annotations

import asyncio
import math
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from statistics import fmean
from typing import Protocol

from roll.rewards.answers import final_text, ground_truth
from roll.types import Metrics, Prompt, RewardOutcome, RewardResult

PLACEHOLDER = re.compile(r"\{(question|response|reference)\}")
YES = r"(?i)\byes\b"
SCORE = r"(?i)\bscore:?[\s*]*:?[\s*]*(\d+(?:\.\d+)?)"
"""Matches `Score: 8`, also with the asterisks of bold text."""
SCORE_OF = 10.0
SCORE_TEMPLATE = "score"
"""Name of the default template, which requests a score. The other shipped template requests YES or NO."""
WORDS = {"yes": 1.0, "true": 1.0, "no": 0.0, "false": 0.0}
"""Words that a pattern's group may match instead of a number, with their values."""
SEARCHED_CHARACTERS = 20_000
"""Number of characters at the end of an answer to search for the pattern."""
NOTE_CHARACTERS = 200


@dataclass(frozen=True)
class JudgeTemplate:
    """A text with the placeholders `{question}`, `{response}` and `{reference}`. All other braces are literal."""

    text: str

    @property
    def needs_reference(self) -> bool:
        """Whether rows must have a reference answer."""
        return "reference" in PLACEHOLDER.findall(self.text)

    def filled(self, question: str, response: str, reference: str) -> str:
        """Return the text with its placeholders filled in, but not those within the inserted texts."""
        values = {"question": question, "response": response, "reference": reference}
        return PLACEHOLDER.sub(lambda found: values[found[1]], self.text)


@dataclass(frozen=True)
class AnswerPattern:
    """Settings for parsing the verdict from a judge's answer."""

    pattern: str
    """Regular expression. If it has a group, the verdict is the group of the last match: a number or one of `WORDS`. If
    it has none, the verdict is 1 for a match and 0 for no match.
    """
    max_score: float | None = None
    """Largest valid number; the verdict is the number divided by it. If None, the verdict is the number itself."""

    @property
    def has_largest(self) -> bool:
        """Whether 1 is the largest verdict. A number without `max_score` has no largest."""
        return self.max_score is not None or not re.compile(self.pattern).groups

    def read(self, answer: str) -> float | None:
        """Return the verdict, or None if the answer has none. Text before `</think>` is ignored."""
        text = final_text(answer)[-SEARCHED_CHARACTERS:]
        if not text:
            return None
        matches = list(re.finditer(self.pattern, text))
        if not re.compile(self.pattern).groups:
            return float(bool(matches))
        return self._number(matches[-1][1]) if matches else None

    def _number(self, found: str | None) -> float | None:
        word = (found or "").strip().lower()
        if word in WORDS:
            return WORDS[word]
        try:
            value = float(word)
        except ValueError:
            return None
        if not math.isfinite(value):
            return None
        if self.max_score is None:
            return value
        return value / self.max_score if 0 <= value <= self.max_score else None


def answer_pattern(pattern: str | None, max_score: float | None, prompt: str | None) -> AnswerPattern:
    """Return the settings of a domain.

    `prompt` is the domain's `judge_prompt`, which determines the default pattern. With the template `score`, the judge
    must write `Score: x`, where x is at most `max_score` (default: 10). With any other prompt, it must write "yes" or
    "no".
    """
    if pattern is not None:
        return AnswerPattern(pattern, max_score)
    return AnswerPattern(SCORE, max_score or SCORE_OF) if prompt in (None, SCORE_TEMPLATE) else AnswerPattern(YES)


def judges_verdict(answers: Sequence[str], pattern: AnswerPattern) -> RewardResult:
    """Return the mean of the verdicts that can be parsed, or UNPARSABLE if none can."""
    note = "judge: " + " ".join(final_text(answers[0]).split())[-NOTE_CHARACTERS:] if answers else ""
    values = [value for answer in answers if (value := pattern.read(answer)) is not None]
    if not values:
        return RewardResult(0.0, RewardOutcome.UNPARSABLE, note=note or "the judge's answer is empty")
    return RewardResult(fmean(values), note=note)


ANSWERS_KEPT = 1 << 16
"""Largest number of cached replies of a domain."""


@dataclass(frozen=True)
class JudgeReply:
    """Result of one call of a judge's or a partner's model."""

    answers: tuple[str, ...] = ()
    """The sampled answers. Empty if the call failed."""
    prompt_tokens: int = 0
    answer_tokens: int = 0
    failure: str = ""
    """Why the call failed; empty if it succeeded."""
    cut: int = 0
    """Number of answers that ended at their largest number of tokens."""


class Chat(Protocol):
    """A model that answers a user message."""

    async def ask(self, message: str, pictures: Sequence[str] = ()) -> JudgeReply:
        """Return the model's reply to a message after pictures, which are data: URLs. A failure is reported in
        `Reply.failure`, not raised.
        """
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
        pictures: Callable[[Prompt], Sequence[str]] | None = None,
    ) -> None:
        """
        Args:
            chat: the judge's model. Its sampling settings must not change, because replies are cached by message.
            question: returns the question that a prompt put to the policy, as text.
            failed_value: value of a result without a verdict.
            pictures: returns the pictures of a prompt as data: URLs. None: the judge sees none.
        """
        self._pictures = pictures
        self._template, self._pattern, self._chat = template, pattern, chat
        self._question, self._failed_value = question, failed_value
        self._replies: OrderedDict[bytes, asyncio.Task[JudgeReply]] = OrderedDict()
        self._counts = dict.fromkeys(("asked", "remembered", "unavailable", "prompt_tokens", "answer_tokens"), 0)

    async def score(self, prompt: Prompt, responses: Sequence[str]) -> list[RewardResult]:
        """Return one result for each response, in order. All are judged concurrently.

        The outcome is UNPARSABLE if the judge's answer cannot be parsed, and UNAVAILABLE if the call of the model
        failed. It is CRASHED if the template needs a reference answer and the row has none.

        Raises:
            RollError: the workers of the judge's model failed, or the file of a picture has changed.
        """
        try:
            reference = ground_truth(prompt.row) if self._template.needs_reference else ""
        except ValueError as error:
            return [
                self._failed(RewardOutcome.CRASHED, f"the judge's template needs a reference answer: {error}")
            ] * len(responses)
        question = self._question(prompt)
        messages = [self._template.filled(question, response, reference) for response in responses]
        shown = tuple(await asyncio.to_thread(self._pictures, prompt)) if self._pictures else ()
        return list(await asyncio.gather(*(self._verdict(message, shown) for message in messages)))

    async def _verdict(self, message: str, pictures: Sequence[str]) -> RewardResult:
        reply = await self._reply(message, pictures)
        if reply.failure:
            self._counts["unavailable"] += 1
            return self._failed(RewardOutcome.UNAVAILABLE, reply.failure)
        result = judges_verdict(reply.answers, self._pattern)
        return result if result.outcome == RewardOutcome.SCORED else self._failed(result.outcome, result.note)

    async def _reply(self, message: str, pictures: Sequence[str]) -> JudgeReply:
        """Return the model's reply. A message sent before or in flight is not sent again. Failures are not cached."""
        key = sha256("\0".join((*pictures, message)).encode()).digest()
        task = self._replies.get(key)
        if task is not None:
            self._counts["remembered"] += 1
            self._replies.move_to_end(key)
            return await asyncio.shield(task)
        self._replies[key] = task = asyncio.create_task(self._answer_of(key, message, pictures))
        if len(self._replies) > ANSWERS_KEPT:
            self._replies.popitem(last=False)
        return await asyncio.shield(task)

    async def _answer_of(self, key: bytes, message: str, pictures: Sequence[str]) -> JudgeReply:
        self._counts["asked"] += 1
        kept = False
        try:
            reply = await self._chat.ask(message, pictures)
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
