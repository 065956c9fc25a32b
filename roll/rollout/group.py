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
        """One result for each response, whatever happens to its reward function."""
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
    answer = answered(prompt, generator, scorer, sampling, seed)
    if greedy_baseline:
        greedy = replace(sampling, samples=1, temperature=0.0, top_p=1.0, top_k=-1)
        samples, baseline = await gathered([answer, answered(prompt, generator, scorer, greedy, seed)])
    else:
        samples, baseline = await answer, []
    completions, results = zip(*samples, *baseline, strict=True)
    episodes = single_turns(prompt, completions, results)
    if locate:
        episodes = await asyncio.to_thread(lambda: [divided(episode, locate) for episode in episodes])
    return RolloutGroup(prompt, episodes[: sampling.samples], episodes[-1] if greedy_baseline else None)


async def answered(
    prompt: Prompt, generator: Generator, scorer: Scorer, sampling: Sampling, seed: int | None
) -> list[tuple[Completion, RewardResult]]:
    """Each sample of a prompt with its reward, in the order of their numbers. Samples that end together are scored together."""
    completions: dict[int, Completion] = {}
    numbers: list[int] = []
    scorings: list[asyncio.Task[Sequence[RewardResult]]] = []
    try:
        async with aclosing(generator.generate(prompt.token_ids, sampling, seed)) as answer:
            async for ended in answer:
                completions |= ended
                numbers += [number for number, _ in ended]
                scorings.append(asyncio.create_task(scorer.score(prompt, [completion.text for _, completion in ended])))
        results = [result for scoring in scorings for result in await scoring]
    finally:
        for scoring in scorings:
            scoring.cancel()
    by_number = dict(zip(numbers, results, strict=True))
    return [(completions[number], by_number[number]) for number in range(sampling.samples)]


async def gathered(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of all; if one fails, the others are given up."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


def prompt_seed(seed: int, stream: int, prompt_id: int) -> int:
    """A 31-bit seed for one prompt, independent of when or where it is answered. `stream` tells training from validation."""
    return int(np.random.SeedSequence((seed, stream, prompt_id)).generate_state(1)[0]) >> 1
