"""Validation: samples responses to held-out prompts from the current policy, and scores them as in training."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from math import comb, nan
from statistics import fmean
from types import MappingProxyType

from roll.config.derived.held_out import sizes
from roll.rewards.answers import final_text, last_boxed
from roll.rewards.passing import USUAL, Bars, passed
from roll.rollout.batch import TRUNCATED, at_limit_fraction
from roll.rollout.group import GroupSampler, Scorer, prompt_seed
from roll.runs.device_phases import DevicePhases
from roll.runs.rlvr.engine_sync import Engines
from roll.tracking.base import Record
from roll.types import NO_VERDICT, Episode, Metrics, Prompt, RewardResult, RolloutGroup

LOG = logging.getLogger(__name__)

NO_BARS: Mapping[str, Bars] = MappingProxyType({})
VALIDATION = 1
"""Stream of seeds for validation prompts."""


@dataclass(frozen=True)
class ByItself:
    """Scores each response independently: the parts of its reward are summed without normalisation over the group."""

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
    """Samples responses to every prompt of one held-out set, and reports how many of them pass."""

    name: str
    prompts: Sequence[Prompt]
    sampler: GroupSampler
    """The scorer of the sampler should be a `ByItself`."""
    samples: int
    """Number of responses to each prompt."""
    seed: int
    """Each prompt's seed derives from this one, so that evaluations of one policy sample the same responses."""
    bars: Mapping[str, Bars] = field(default_factory=dict)
    """When a response passes, by domain."""

    async def run(self, keep: Callable[[str, Sequence[RolloutGroup]], None]) -> Metrics:
        """Return the set's `validation_metrics`. Call `keep` with the set's name and its groups of scored responses."""
        groups = await self.answers()
        keep(self.name, groups)
        return validation_metrics(self.name, groups, self.samples, self.bars)

    async def answers(self) -> list[RolloutGroup]:
        """Return a group of scored responses for every prompt. Warn about rewards without a verdict."""
        groups = await asyncio.gather(
            *(
                self.sampler.sample(prompt, prompt_seed(self.seed, VALIDATION, prompt.prompt_id))
                for prompt in self.prompts
            )
        )
        if failed := unscored(groups):
            total = sum(len(group.episodes) for group in groups)
            said = "so there is no result" if failed == total else "and count as failed"
            LOG.warning("%s: %d of %d responses got no verdict, %s", self.name, failed, total, said)
        return groups


@dataclass(frozen=True)
class Validation:
    """Evaluates all held-out sets before the first step, every `every` steps and after the last step."""

    every: int
    """Number of steps; 0 for no validation."""
    last_step: int
    sets: Sequence[Evaluator]
    phases: DevicePhases
    engines: Engines
    part: Callable[[str], AbstractContextManager[None]]
    """Times the whole as `evaluate`; see `Meter.part`."""
    record: Record

    async def after(self, step: int) -> Metrics:
        """Return the metrics after a step, with the responses recorded. Empty if validation is not due."""
        if not self.every or (step % self.every and step != self.last_step):
            return {}
        assert self.sets, "eval_steps requires a validation block"
        await self.phases.generation()
        with self.part("evaluate"):
            async with self.engines.generating():
                found = await asyncio.gather(*(one.run(partial(self.record.held_out, step)) for one in self.sets))
        return {name: value for metrics in found for name, value in metrics.items()}


def validation_metrics(
    name: str, groups: Sequence[RolloutGroup], samples: int, bars: Mapping[str, Bars] = NO_BARS
) -> Metrics:
    """Return pass rates, majority votes, rewards with their parts, lengths and the oldest policy version of one set.

    Pass rates and majority votes are those of the prompts whose domain has an accuracy. They are left out if there are
    none. A response without a verdict counts as failed. If no response has a verdict, pass rates, majority votes and
    rewards are left out.

    Args:
        samples: number of responses to each prompt.
        bars: when a response passes, by domain; `USUAL` for the domains that are not named.
    """
    episodes = [episode for group in groups for episode in group.episodes]
    judged = judged_groups(groups, bars)
    passes = [passes_of(group, bars) for group in judged]
    answers = [[_answer(episode) for episode in group.episodes] for group in judged]
    metrics: Metrics = {}
    for k in sizes(samples) if judged else ():
        metrics[f"val/{name}/pass@{k}"] = fmean(estimate_pass_at_k(samples, sum(each), k) for each in passes)
    for k in sizes(samples)[1:] if judged else ():
        votes = [majority_at_k(theirs, right, k) for theirs, right in zip(answers, passes, strict=True)]
        metrics[f"val/{name}/maj@{k}"] = fmean(votes)
    failed = unscored(groups)
    if failed < len(episodes):
        metrics[f"val/{name}/avg@{samples}"] = fmean(earned(episode.reward) for episode in episodes)
        metrics |= {f"val/{name}/{part}/mean": fmean(means) for part, means in part_means(groups).items()}
    versions = [run.version for episode in episodes for segment in episode.sampled for run in segment.versions]
    lengths = [episode.length for episode in episodes]
    return metrics | {
        f"val/{name}/no_verdict_fraction": failed / len(episodes),
        f"val/{name}/length_mean": fmean(lengths),
        f"val/{name}/length_max": float(max(lengths)),
        f"val/{name}/at_limit_fraction": at_limit_fraction(episodes),
        f"val/{name}/truncated_fraction": sum(episode.stop in TRUNCATED for episode in episodes) / len(episodes),
        f"val/{name}/policy_version": float(min(versions, default=nan)),
    }


def judged_groups(groups: Sequence[RolloutGroup], bars: Mapping[str, Bars]) -> list[RolloutGroup]:
    """Return the groups whose domain has an accuracy; no groups if none of their responses has a verdict."""
    judged = [group for group in groups if bars_for(bars, group)]
    return judged if unscored(judged) < sum(len(group.episodes) for group in judged) else []


def unscored(groups: Sequence[RolloutGroup]) -> int:
    """Return the number of responses whose reward gave no verdict."""
    return sum(episode.reward.outcome in NO_VERDICT for group in groups for episode in group.episodes)


def bars_for(bars: Mapping[str, Bars], group: RolloutGroup) -> Bars:
    """Return the bars for the responses of a group. Empty if its domain has no accuracy."""
    return bars.get(group.prompt.domain, USUAL)


def passes_of(group: RolloutGroup, bars: Mapping[str, Bars]) -> list[bool]:
    """Return whether each response of a group passes. `bars` are those of all domains."""
    return [passed(episode, bars_for(bars, group)) for episode in group.episodes]


def earned(reward: RewardResult) -> float:
    """Return the reward of a response; 0 without a verdict."""
    return 0.0 if reward.outcome in NO_VERDICT else reward.value


def part_means(groups: Sequence[RolloutGroup]) -> dict[str, list[float]]:
    """Return the means over the responses to each prompt by part of the reward, for the prompts of domains with that
    part. A response without a verdict, or without the part, counts as 0.
    """
    having: dict[str, set[str]] = defaultdict(set)
    for group in groups:
        for episode in group.episodes:
            for part in episode.reward.parts:
                having[part].add(group.prompt.domain)
    return {
        part: [
            fmean(_part(episode.reward, part) for episode in group.episodes)
            for group in groups
            if group.prompt.domain in having[part]
        ]
        for part in sorted(having)
    }


def _part(reward: RewardResult, name: str) -> float:
    return 0.0 if reward.outcome in NO_VERDICT else reward.parts.get(name, 0.0)


def _answer(episode: Episode) -> str:
    """Return the final answer of a response: the last box after the thinking, or else the last line. Return "" if there
    is neither.

    The answer is read from the text alone, without the reference answer. All whitespace is removed.
    """
    text = final_text(episode.text)
    answer = last_boxed(text) or (text.splitlines() or [""])[-1]
    return "".join(answer.split())


def estimate_pass_at_k(samples: int, passed: int, k: int) -> float:
    """Return an unbiased estimate of the probability that at least one of k samples passes, if c = `passed` of n =
    `samples` do.

    1 - C(n - c, k) / C(n, k). Source: Chen et al., arXiv 2107.03374, eq. 1.
    """
    return 1.0 - comb(samples - passed, k) / comb(samples, k)


def majority_at_k(answers: Sequence[str], passes: Sequence[bool], k: int) -> float:
    """Return an unbiased estimate of the probability that the most frequent answer of k samples passes.

    The estimate is the mean over consecutive blocks of k samples. A remainder of fewer than k samples is left out.
    """
    starts = range(0, len(answers) - k + 1, k)
    return fmean(majority(answers[start : start + k], passes[start : start + k]) for start in starts)


def majority(answers: Sequence[str], passes: Sequence[bool]) -> float:
    """Return the probability that the most frequent answer passes.

    Empty answers do not vote, and without any vote the result is 0. A tie is broken at random. If only some samples
    with the same answer pass, their share counts.
    """
    votes = Counter(answer for answer in answers if answer)
    most = max(votes.values(), default=0)
    return fmean(
        [passed for answer, passed in zip(answers, passes, strict=True) if votes[answer] == most] if most else [0.0]
    )
