"""Turns one prompt into one scored group. The protocols here state what rollouts require of generation and rewards.

Generation and judging on the same devices, in turn: judging starts once all requested responses are generated.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import numpy as np

from roll.rollout.record import Locate, by_turns, single_turns, without_placeholder
from roll.types import (
    AskedPictures,
    Completion,
    Episode,
    Ints,
    NumberedCompletions,
    Prompt,
    RewardResult,
    RolloutGroup,
    Sampling,
)

T = TypeVar("T")


class Generator(Protocol):
    """Samples responses to prompts from the current policy."""

    def generate(
        self, token_ids: Ints, sampling: Sampling, seed: int | None = None, *, shown: AskedPictures | None = None
    ) -> AsyncGenerator[NumberedCompletions, None]:
        """Yield completions as they end, `sampling.samples` in all. A seed makes them reproducible.

        `shown` are the pictures of the prompt. None if it shows none.
        """
        ...


class Scorer(Protocol):
    """Computes rewards of responses."""

    async def score(self, prompt: Prompt, responses: Sequence[str]) -> Sequence[RewardResult]:
        """Return one result for each response, even if its reward function fails.

        If the reward `compares` responses, pass all responses to the prompt in one call; otherwise pass any number of
        them.
        """
        ...

    def compares(self, prompt: Prompt) -> bool:
        """Whether the prompt's reward needs all responses in one call."""
        ...

    def combined(self, prompt: Prompt, results: Sequence[RewardResult]) -> Sequence[RewardResult]:
        """Return the final results of a whole group, given the results of its members.

        They differ from the given ones only if the reward compares the members.
        """
        ...


class GroupSampler(Protocol):
    """Samples a group of attempts at a prompt: single responses, or episodes."""

    async def sample(self, prompt: Prompt, seed: int | None) -> RolloutGroup:
        """Return all attempts at a prompt, finished and scored. A seed makes them reproducible."""
        ...

    def yields(self, prompt: Prompt, episodes: Sequence[Episode], baseline: Episode | None) -> bool:
        """Whether stored attempts have the form of those that `sample` would return now.

        The number of attempts, the presence of a baseline and the presence of log-probs must match.
        """
        ...


@dataclass(frozen=True)
class SingleTurns:
    """Implements `GroupSampler` with single responses."""

    generator: Generator
    scorer: Scorer
    sampling: Sampling
    greedy_baseline: bool = False
    """Whether to sample one greedy response too, as the group's `baseline`."""
    locate: Locate | None = None
    """Finds the token at which each turn ends: a turn becomes a segment. With None, a response is one."""

    async def sample(self, prompt: Prompt, seed: int | None) -> RolloutGroup:
        """See `GroupSampler`. Several prompts may be sampled at the same time."""
        sampling, locate = self.sampling, self.locate
        shown = None if prompt.shown is None else await asyncio.to_thread(prompt.shown.asked)
        answer = self.generator.generate(prompt.token_ids, sampling, seed, shown=shown)
        if self.greedy_baseline:
            greedy = replace(sampling, samples=1, temperature=0.0, top_p=1.0, top_k=-1)
            other = self.generator.generate(prompt.token_ids, greedy, seed, shown=shown)
            answer = followed(answer, sampling.samples, other)
        async with aclosing(_Scored(prompt, self.scorer)) as scored, aclosing(answer):
            async for ended in answer:
                scored.add([(number, without_placeholder(one, sampling.placeholder)) for number, one in ended])
            completions, results = await scored.group()
        episodes = single_turns(prompt, completions, results)
        if locate:
            episodes = await asyncio.to_thread(lambda: [by_turns(episode, locate) for episode in episodes])
        return RolloutGroup(prompt, episodes[: sampling.samples], episodes[-1] if self.greedy_baseline else None)

    def yields(self, prompt: Prompt, episodes: Sequence[Episode], baseline: Episode | None) -> bool:
        return (baseline is not None) == self.greedy_baseline and sampled_so(episodes, self.sampling)


def sampled_so(episodes: Sequence[Episode], sampling: Sampling) -> bool:
    """Whether the number of episodes, and the presence of log-probs, match the sampling parameters."""
    log_probs = {segment.log_probs is not None for one in episodes for segment in one.sampled if len(segment.token_ids)}
    return len(episodes) == sampling.samples and log_probs <= {sampling.log_probs}


class _Scored:
    """Collects the responses to a prompt and their rewards, by number. Those that end together are scored together."""

    def __init__(self, prompt: Prompt, scorer: Scorer) -> None:
        self._prompt, self._scorer, self._compares = prompt, scorer, scorer.compares(prompt)
        self._completions: dict[int, Completion] = {}
        self._scorings: list[tuple[list[int], asyncio.Task[Sequence[RewardResult]]]] = []

    def add(self, ended: NumberedCompletions) -> None:
        """Add completions that ended together, and start scoring them unless the reward compares all of them."""
        self._completions |= ended
        if not self._compares:
            self._score([number for number, _ in ended])

    def _score(self, numbers: list[int]) -> None:
        scoring = self._scorer.score(self._prompt, [self._completions[number].text for number in numbers])
        self._scorings.append((numbers, asyncio.ensure_future(scoring)))

    async def group(self) -> tuple[list[Completion], Sequence[RewardResult]]:
        """Return all completions and results in order of their numbers. Call once all completions have ended."""
        order = sorted(self._completions)
        if self._compares:
            self._score(order)
        by_number: dict[int, RewardResult] = {}
        for numbers, scoring in self._scorings:
            by_number |= zip(numbers, await scoring, strict=True)
        results = self._scorer.combined(self._prompt, [by_number[number] for number in order])
        return [self._completions[number] for number in order], results

    async def aclose(self) -> None:
        """Cancel scoring that is still in progress."""
        for _, scoring in self._scorings:
            scoring.cancel()


async def followed(
    first: AsyncGenerator[NumberedCompletions, None], samples: int, second: AsyncGenerator[NumberedCompletions, None]
) -> AsyncGenerator[NumberedCompletions, None]:
    """Yield the completions of two concurrent requests as they end. Those of `second` are numbered from `samples`."""
    ended: asyncio.Queue[NumberedCompletions | BaseException | None] = asyncio.Queue()

    async def forward(answer: AsyncGenerator[NumberedCompletions, None], begin: int) -> None:
        async with aclosing(answer):
            async for numbered in answer:
                ended.put_nowait([(begin + number, completion) for number, completion in numbered])

    tasks = [asyncio.create_task(forward(first, 0)), asyncio.create_task(forward(second, samples))]
    asyncio.gather(*tasks).add_done_callback(lambda both: ended.put_nowait(both.exception()))
    try:
        while (numbered := await ended.get()) is not None:
            if isinstance(numbered, BaseException):
                raise numbered
            yield numbered
    finally:
        for task in tasks:
            task.cancel()


async def gather_or_cancel(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Await all coroutines and return their results; if one fails, cancel the others."""
    if len(work) == 1:  # saves the cost of a task
        return [await work[0]]
    tasks = [asyncio.create_task(one) for one in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


def prompt_seed(seed: int, stream: int, prompt_id: int) -> int:
    """Return a 31-bit seed for a prompt, wherever it is sampled. `stream` separates training from validation."""
    return _derived(seed, stream, prompt_id)


def sample_seed(seed: int, sample: int) -> int:
    """Derive the seed of an episode from the seed of its prompt."""
    return _derived(seed, sample)


def turn_seed(seed: int, turn: int) -> int:
    """Derive the seed of a turn from the seed of its episode."""
    return _derived(seed, turn)


def _derived(*numbers: int) -> int:
    return int(np.random.SeedSequence(numbers).generate_state(1)[0]) >> 1


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
        self, token_ids: Ints, sampling: Sampling, seed: int | None = None, *, shown: AskedPictures | None = None
    ) -> AsyncGenerator[NumberedCompletions, None]:
        async with self._changes:
            await self._changes.wait_for(lambda: not self._scoring)
            if self._domain is not None:
                await self._generation()
                self._domain = None
            self._generating += 1
        try:
            async with aclosing(self._generator.generate(token_ids, sampling, seed, shown=shown)) as answer:
                async for ended in answer:
                    yield ended
        finally:
            self._generating -= 1
            await self._changed()

    async def score(self, prompt: Prompt, responses: Sequence[str]) -> Sequence[RewardResult]:
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
        return self._scorer.compares(prompt)

    def combined(self, prompt: Prompt, results: Sequence[RewardResult]) -> Sequence[RewardResult]:
        return self._scorer.combined(prompt, results)
