"""One prompt to one scored group. What the rollout side needs of the others is said here as protocols."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import numpy as np

from roll.rollout.record import single_turns
from roll.rollout.turns import Locate, divided
from roll.types import Completion, Ints, NumberedCompletions, Prompt, RewardResult, RolloutGroup, Sampling

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


async def sample_group(
    prompt: Prompt,
    generator: Generator,
    scorer: Scorer,
    sampling: Sampling,
    seed: int | None,
    greedy_baseline: bool = False,
    locate: Locate | None = None,
) -> RolloutGroup:
    """Sample a prompt's responses and score them. Other prompts are answered meanwhile.

    Args:
        greedy_baseline: answer the prompt once more, with the most probable tokens, for the group's `baseline`.
        locate: finds where turns end in tokens, so that each is a segment; None leaves responses undivided.
    """
    drawing = [generator.generate(prompt.token_ids, sampling, seed)]
    if greedy_baseline:
        greedy = replace(sampling, samples=1, temperature=0.0, top_p=1.0, top_k=-1)
        drawing.append(generator.generate(prompt.token_ids, greedy, seed))
    async with aclosing(_Scored(prompt, scorer)) as scored:
        await gathered([scored.draw(answer, sampling.samples * number) for number, answer in enumerate(drawing)])
        completions, results = await scored.group()
    episodes = single_turns(prompt, completions, results)
    if locate:
        episodes = await asyncio.to_thread(lambda: [divided(episode, locate) for episode in episodes])
    return RolloutGroup(prompt, episodes[: sampling.samples], episodes[-1] if greedy_baseline else None)


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
        """Give up what is still being scored."""
        for _, scoring in self._scorings:
            scoring.cancel()


async def gathered(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of all; if one fails, the others are given up."""
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
    return int(np.random.SeedSequence((seed, stream, prompt_id)).generate_state(1)[0]) >> 1
