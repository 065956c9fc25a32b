"""Generation and judging on the same devices, in turn: judging starts once all requested responses are generated."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing

from roll.rollout.group import Generator, Scorer
from roll.types import Ints, NumberedCompletions, Prompt, RewardResult, Sampling


class JudgedInTurn:
    """Implements `Generator` and `Scorer` by delegating to a given pair. For use from one asyncio event loop.

    Domains whose judge models share devices are judged one after the other. Responses requested meanwhile are generated
    afterwards.
    """

    def __init__(
        self,
        generator: Generator,
        scorer: Scorer,
        judging: Mapping[str, Callable[[], Awaitable[None]]],
        generation: Callable[[], Awaitable[None]],
    ) -> None:
        """
        Args:
            judging: for each domain with a judge model on shared devices, a function that loads the model onto them.
                Responses of other domains are scored immediately.
            generation: loads the engines back onto the devices.
        """
        self._generator, self._scorer, self._judging, self._generation = generator, scorer, judging, generation
        self._changes = asyncio.Condition()
        self._generating = self._scoring = 0
        self._domain: str | None = None
        """Domain whose judge model is on the devices; None while the engines may be on them."""

    async def generate(
        self, token_ids: Ints, sampling: Sampling, seed: int | None = None
    ) -> AsyncGenerator[NumberedCompletions, None]:
        """See `Generator`."""
        async with self._changes:
            await self._changes.wait_for(lambda: not self._scoring)
            if self._domain is not None:
                await self._generation()
                self._domain = None
            self._generating += 1
        try:
            async with aclosing(self._generator.generate(token_ids, sampling, seed)) as answer:
                async for ended in answer:
                    yield ended
        finally:
            self._generating -= 1
            await self._changed()

    async def score(self, prompt: Prompt, responses: Sequence[str]) -> Sequence[RewardResult]:
        """See `Scorer`."""
        domain = prompt.domain
        if domain not in self._judging:
            return await self._scorer.score(prompt, responses)
        async with self._changes:
            await self._changes.wait_for(lambda: not self._generating and (not self._scoring or self._domain == domain))
            if self._domain != domain:
                await self._judging[domain]()
                self._domain = domain
            self._scoring += 1
        try:
            return await self._scorer.score(prompt, responses)
        finally:
            self._scoring -= 1
            await self._changed()

    async def _changed(self) -> None:
        async with self._changes:
            self._changes.notify_all()

    def compares(self, prompt: Prompt) -> bool:
        """See `Scorer`."""
        return self._scorer.compares(prompt)

    def combined(self, prompt: Prompt, results: Sequence[RewardResult]) -> Sequence[RewardResult]:
        """See `Scorer`."""
        return self._scorer.combined(prompt, results)
