"""Turns one prompt into one scored group. The protocols here are what the rollout side requires of other parts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import numpy as np

from roll.rollout.record import single_turns
from roll.rollout.turns import Locate, divided
from roll.types import Completion, Episode, Ints, NumberedCompletions, Prompt, RewardResult, RolloutGroup, Sampling

T = TypeVar("T")


class Generator(Protocol):
    """Something that answers prompts with the current policy."""

    def generate(self, token_ids: Ints, sampling: Sampling, seed: int | None = None) -> AsyncGenerator[NumberedCompletions, None]:
        """`sampling.samples` completions, as they end; a seed makes them reproducible."""
        ...


class Scorer(Protocol):
    """Something that rewards responses."""

    async def score(self, prompt: Prompt, responses: Sequence[str]) -> Sequence[RewardResult]:
        """One result for each response, whatever happens to its reward function.

        The responses are all that are compared with each other where the prompt `compares`, else any of them.
        """
        ...

    def compares(self, prompt: Prompt) -> bool:
        """Whether the prompt's reward needs all responses at once."""
        ...

    def combined(self, prompt: Prompt, results: Sequence[RewardResult]) -> Sequence[RewardResult]:
        """What the results of a whole group become once all of them are there; the same results where nothing is compared."""
        ...


class GroupSampler(Protocol):
    """Answers a prompt several times over: with single responses, or with episodes."""

    async def sample(self, prompt: Prompt, seed: int | None) -> RolloutGroup:
        """All attempts at a prompt, finished and scored. A seed makes them reproducible."""
        ...

    def yields(self, prompt: Prompt, episodes: Sequence[Episode], baseline: Episode | None) -> bool:
        """Whether attempts that were stored hold what `sample` yields now: as many, with log-probs or without."""
        ...


@dataclass(frozen=True)
class SingleTurns:
    """Implements `GroupSampler`: a prompt and its responses."""

    generator: Generator
    scorer: Scorer
    sampling: Sampling
    greedy_baseline: bool = False
    """Answer the prompt once more, with the most probable tokens, for the group's `baseline`."""
    locate: Locate | None = None
    """Finds where turns end in tokens, so that each is a segment; None leaves responses undivided."""

    async def sample(self, prompt: Prompt, seed: int | None) -> RolloutGroup:
        """See `GroupSampler`. Other prompts are answered meanwhile."""
        sampling, locate = self.sampling, self.locate
        drawing = [self.generator.generate(prompt.token_ids, sampling, seed)]
        if self.greedy_baseline:
            greedy = replace(sampling, samples=1, temperature=0.0, top_p=1.0, top_k=-1)
            drawing.append(self.generator.generate(prompt.token_ids, greedy, seed))
        async with aclosing(_Scored(prompt, self.scorer)) as scored:
            await gathered([scored.draw(answer, sampling.samples * number) for number, answer in enumerate(drawing)])
            completions, results = await scored.group()
        episodes = single_turns(prompt, completions, results)
        if locate:
            episodes = await asyncio.to_thread(lambda: [divided(episode, locate) for episode in episodes])
        return RolloutGroup(prompt, episodes[: sampling.samples], episodes[-1] if self.greedy_baseline else None)

    def yields(self, prompt: Prompt, episodes: Sequence[Episode], baseline: Episode | None) -> bool:
        """See `GroupSampler`."""
        return (baseline is not None) == self.greedy_baseline and sampled_so(episodes, self.sampling)


def sampled_so(episodes: Sequence[Episode], sampling: Sampling) -> bool:
    """Whether there are as many as sampling yields, and their tokens have log-probs if it keeps them."""
    log_probs = {segment.log_probs is not None for one in episodes for segment in one.sampled if len(segment.token_ids)}
    return len(episodes) == sampling.samples and log_probs <= {sampling.log_probs}


class _Scored:
    """The responses to one prompt, by the number of their sample, and their rewards. Responses that end together are scored together."""

    def __init__(self, prompt: Prompt, scorer: Scorer) -> None:
        self._prompt, self._scorer, self._compares = prompt, scorer, scorer.compares(prompt)
        self._completions: dict[int, Completion] = {}
        self._scorings: list[tuple[list[int], asyncio.Task[Sequence[RewardResult]]]] = []

    async def draw(self, answer: AsyncGenerator[NumberedCompletions, None], first: int) -> None:
        """Take completions as they end; the number of the first sample is given."""
        async with aclosing(answer):
            async for ended in answer:
                numbers = [first + number for number, _ in ended]
                self._completions |= zip(numbers, (completion for _, completion in ended), strict=True)
                if not self._compares:
                    self._score(numbers)

    def _score(self, numbers: list[int]) -> None:
        scoring = self._scorer.score(self._prompt, [self._completions[number].text for number in numbers])
        self._scorings.append((numbers, asyncio.ensure_future(scoring)))

    async def group(self) -> tuple[list[Completion], Sequence[RewardResult]]:
        """All of them in the order of their numbers, once all have ended."""
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


async def gathered(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of all; if one fails, the others are cancelled."""
    if len(work) == 1:  # a task costs the host more than most of what it does here
        return [await work[0]]
    tasks = [asyncio.create_task(one) for one in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


def prompt_seed(seed: int, stream: int, prompt_id: int) -> int:
    """A 31-bit seed for one prompt, independent of when or where it is answered. `stream` tells training from validation."""
    return _derived(seed, stream, prompt_id)


def sample_seed(seed: int, sample: int) -> int:
    """A seed for one episode of a prompt that has this seed."""
    return _derived(seed, sample)


def turn_seed(seed: int, turn: int) -> int:
    """A seed for one turn of an episode that has this seed."""
    return _derived(seed, turn)


def _derived(*numbers: int) -> int:
    return int(np.random.SeedSequence(numbers).generate_state(1)[0]) >> 1
