"""A reward model: the score of a conversation that ends with the response."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from roll.rewards.judging import NOTE_CHARACTERS
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
            encode: from a prompt and a response to the tokens of the whole, up to that at which the score is read; raises ValueError
                for a conversation that the model's chat template refuses.
            context: the most tokens that the model can read.
            failed_value: of a response without a verdict.
        """
        self._classifier, self._encode = classifier, encode
        self._context, self._failed_value = context, failed_value
        self._encodes = asyncio.Lock()  # tokenizers are not thread-safe

    async def score(self, prompt: Prompt, responses: Sequence[str]) -> list[RewardResult]:
        """Return one result for each response, in order: the model's score.

        UNAVAILABLE for what is too long for the model, CRASHED for what its chat template refuses.

        Raises:
            RollError: what the model's group raised.
        """
        async with self._encodes:
            encoded = await asyncio.to_thread(lambda: [self._encoded(prompt, response) for response in responses])
        sequences = [tokens for tokens in encoded if not isinstance(tokens, RewardResult)]
        scores = iter(await self._classifier.scores(sequences) if sequences else ())
        return [tokens if isinstance(tokens, RewardResult) else RewardResult(next(scores)) for tokens in encoded]

    def _encoded(self, prompt: Prompt, response: str) -> Ints | RewardResult:
        """Return the tokens to score, or why there are none."""
        try:
            tokens = self._encode(prompt, response)
        except ValueError as error:
            return RewardResult(self._failed_value, RewardOutcome.CRASHED, note=str(error)[:NOTE_CHARACTERS])
        if len(tokens) <= self._context:
            return tokens
        note = f"what the reward model is to score has {len(tokens)} tokens, and its context {self._context}"
        return RewardResult(self._failed_value, RewardOutcome.UNAVAILABLE, note=note)
