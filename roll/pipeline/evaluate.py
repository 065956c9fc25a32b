"""Validation: held-out prompts answered by the current policy and scored as in training."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from math import comb, nan

import numpy as np

from roll.rollout.batch import TRUNCATED
from roll.rollout.group import Generator, Scorer, prompt_seed, sample_group
from roll.types import NO_VERDICT, Metrics, Prompt, RewardOutcome, RewardResult, RolloutGroup, Sampling

LOG = logging.getLogger(__name__)

VALIDATION = 1
"""Seed stream of validation prompts."""


@dataclass(frozen=True)
class ByItself:
    """Scores a response by what it is, not by the others of its group: the sum of its parts is not normalised."""

    scorer: Scorer

    async def score(self, prompt: Prompt, responses: Sequence[str]) -> Sequence[RewardResult]:
        """See `Scorer`."""
        return await self.scorer.score(prompt, responses)

    def compares(self, prompt: Prompt) -> bool:
        """See `Scorer`."""
        return self.scorer.compares(prompt)

    def combined(self, prompt: Prompt, results: Sequence[RewardResult]) -> Sequence[RewardResult]:
        """See `Scorer`."""
        return results


@dataclass(frozen=True)
class Evaluator:
    """Answers every held-out prompt and reports how many answers pass."""

    name: str
    prompts: Sequence[Prompt]
    generator: Generator
    scorer: Scorer
    sampling: Sampling
    seed: int
    """Every prompt keeps its own seed, so two evaluations of one policy give the same answers."""

    async def run(self) -> Metrics:
        """`val/<name>/pass@1`, pass@k for k samples a prompt, and length. Warns of rewards without a verdict."""
        groups = await asyncio.gather(
            *(
                sample_group(
                    prompt, self.generator, ByItself(self.scorer), self.sampling, prompt_seed(self.seed, VALIDATION, prompt.prompt_id)
                )
                for prompt in self.prompts
            )
        )
        rewards = [episode.reward for group in groups for episode in group.episodes]
        if notes := [reward.note for reward in rewards if reward.outcome in NO_VERDICT]:
            said = "; ".join(sorted(set(notes))[:3])
            LOG.warning("%s: %d of %d responses got no verdict and count as failed: %s", self.name, len(notes), len(rewards), said)
        return validation_metrics(self.name, groups, self.sampling.samples)


def validation_metrics(name: str, groups: Sequence[RolloutGroup], samples: int) -> Metrics:
    """A response passes if it was scored and its reward is above 0."""
    passed = [sum(_passes(episode.reward) for episode in group.episodes) for group in groups]
    episodes = [episode for group in groups for episode in group.episodes]
    metrics = {f"val/{name}/pass@{k}": float(np.mean([pass_at_k(samples, c, k) for c in passed])) for k in sorted({1, samples})}
    versions = [run.version for episode in episodes for segment in episode.sampled for run in segment.versions]
    truncated = sum(episode.stop in TRUNCATED for episode in episodes)
    return metrics | {
        f"val/{name}/length_mean": float(np.mean([episode.length for episode in episodes])),
        f"val/{name}/truncated_fraction": truncated / len(episodes),
        f"val/{name}/policy_version": float(min(versions, default=nan)),
    }


def _passes(reward: RewardResult) -> bool:
    return reward.outcome is RewardOutcome.SCORED and reward.value > 0


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """Probability that one of k samples passes, without bias, from `passed` of `samples`.

    1 - C(n - c, k) / C(n, k). Source: Chen et al., arXiv 2107.03374, eq. 1.
    """
    return 1.0 - comb(samples - passed, k) / comb(samples, k)
