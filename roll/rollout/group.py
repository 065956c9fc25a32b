"""One prompt to one scored group. What the rollout side needs of the others is said here as protocols."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from roll.rollout.record import single_turns
from roll.rollout.turns import Locate, divided
from roll.types import Completion, Ints, Prompt, RewardResult, RolloutGroup, Sampling


class Generator(Protocol):
    """Something that answers prompts with the current policy."""

    async def generate(self, token_ids: Ints, sampling: Sampling, seed: int | None = None) -> Sequence[Completion]:
        """`sampling.samples` completions; a seed makes them reproducible."""
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
    answer = generator.generate(prompt.token_ids, sampling, seed)
    if greedy_baseline:
        greedy = replace(sampling, samples=1, temperature=0.0, top_p=1.0, top_k=-1)
        both = await asyncio.gather(answer, generator.generate(prompt.token_ids, greedy, seed))
        completions = [completion for one in both for completion in one]
    else:
        completions = await answer
    results = scorer.combined(prompt, await scorer.score(prompt, [completion.text for completion in completions]))
    episodes = single_turns(prompt, completions, results)
    if locate:
        episodes = await asyncio.to_thread(lambda: [divided(episode, locate) for episode in episodes])
    return RolloutGroup(prompt, episodes[: sampling.samples], episodes[-1] if greedy_baseline else None)


def prompt_seed(seed: int, stream: int, prompt_id: int) -> int:
    """A 31-bit seed for one prompt, independent of when or where it is answered. `stream` tells training from validation."""
    return int(np.random.SeedSequence((seed, stream, prompt_id)).generate_state(1)[0]) >> 1
