"""A reward model: the score of a conversation that ends with the response."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from roll.types import Ints, Prompt, RewardOutcome, RewardResult


class Classifier(Protocol):
    """A model that scores sequences of tokens."""

    async def scores(self, sequences: Sequence[Ints]) -> Sequence[float]:
        """The score of each."""
        ...


class Scorer:
    """The rewards of one domain. For use from one asyncio event loop."""

    def __init__(self, classifier: Classifier, encode: Callable[[Prompt, str], Ints], context: int, failed_value: float) -> None:
        """
        Args:
            encode: from a prompt and a response to the tokens of the whole, up to that at which the score is read.
            context: the most tokens that the model can read.
            failed_value: of a response without a verdict.
        """
        self._classifier, self._encode = classifier, encode
        self._context, self._failed_value = context, failed_value
        self._encodes = asyncio.Lock()  # tokenizers are not for several threads at a time

    async def score(self, prompt: Prompt, responses: Sequence[str]) -> list[RewardResult]:
        """One result for each response, in order: the model's score as it is, UNAVAILABLE for what is too long for the model.

        Raises:
            RollError: what the model's group raised.
        """
        async with self._encodes:
            sequences = await asyncio.to_thread(lambda: [self._encode(prompt, response) for response in responses])
        fitting = [tokens for tokens in sequences if len(tokens) <= self._context]
        scores = iter(await self._classifier.scores(fitting) if fitting else ())
        return [RewardResult(next(scores)) if len(tokens) <= self._context else self._too_long(len(tokens)) for tokens in sequences]

    def _too_long(self, tokens: int) -> RewardResult:
        note = f"what the reward model is to score has {tokens} tokens, and its context {self._context}"
        return RewardResult(self._failed_value, RewardOutcome.UNAVAILABLE, note=note)
