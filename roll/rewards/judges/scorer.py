"""A reward model as the reward of a domain: it scores a conversation that ends with the response."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from roll.rewards.judges.judging import NOTE_CHARACTERS
from roll.types import Ints, Prompt, RewardOutcome, RewardResult


class Classifier(Protocol):
    """A model that scores sequences of tokens."""

    async def scores(self, sequences: Sequence[Ints]) -> Sequence[float]:
        """Return the score of each sequence."""
        ...


class Scorer:
    """Scores the responses of one domain. Must be used from a single asyncio event loop."""

    def __init__(
        self, classifier: Classifier, encode: Callable[[Prompt, str], Ints], context: int, failed_value: float
    ) -> None:
        """
        Args:
            encode: returns the tokens of a prompt with its response, up to the token at which the score is read. Raises
                ValueError if the model's chat template rejects the conversation.
            context: largest number of tokens that the model accepts.
            failed_value: value of a result without a verdict.
        """
        self._classifier, self._encode = classifier, encode
        self._context, self._failed_value = context, failed_value
        self._encodes = asyncio.Lock()  # tokenizers are not thread-safe

    async def score(self, prompt: Prompt, responses: Sequence[str]) -> list[RewardResult]:
        """Return one result for each response, in order, with the model's score.

        The outcome is UNAVAILABLE if the conversation is too long for the model, and CRASHED if the model's chat
        template rejects it.

        Raises:
            RollError: the workers of the reward model failed.
        """
        async with self._encodes:
            encoded = await asyncio.to_thread(lambda: [self._encoded(prompt, response) for response in responses])
        sequences = [tokens for tokens in encoded if not isinstance(tokens, RewardResult)]
        scores = iter(await self._classifier.scores(sequences) if sequences else ())
        return [tokens if isinstance(tokens, RewardResult) else RewardResult(next(scores)) for tokens in encoded]

    def _encoded(self, prompt: Prompt, response: str) -> Ints | RewardResult:
        """Return the tokens to score, or a result with the reason why they cannot be scored."""
        try:
            tokens = self._encode(prompt, response)
        except ValueError as error:
            return RewardResult(self._failed_value, RewardOutcome.CRASHED, note=str(error)[:NOTE_CHARACTERS])
        if len(tokens) <= self._context:
            return tokens
        note = f"the conversation has {len(tokens)} tokens, but the context of the reward model is {self._context}"
        return RewardResult(self._failed_value, RewardOutcome.UNAVAILABLE, note=note)
