"""Samples groups of episodes: all attempts at one task are played concurrently and get their rewards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from roll.agents.episodes import Player
from roll.data.prompts import SEED
from roll.rollout.filters import has_verdict
from roll.rollout.group import GroupSampler, Scorer, gather_or_cancel, prompt_seed, sample_seed, sampled_so
from roll.rollout.record import observed
from roll.types import Episode, Prompt, RewardOutcome, RewardResult, RolloutGroup, Sampling, StopReason

TRAINING, HELD_OUT = 2, 3
"""Seed streams of environments, for rows without a seed."""
CUT = (StopReason.MAX_TURNS, StopReason.CONTEXT_FULL)
"""Reasons to end an episode between two turns, against the will of policy and environment."""
IN_ENVIRONMENT = "environment"
"""Name of the reward part that came from the environment, if a reward function adds to it."""


@dataclass(frozen=True)
class EpisodeGroups:
    """Implements `GroupSampler`. All episodes of a group start from the same state: the same row and seed."""

    episodes: Player
    sampling: Sampling
    """Sampling of one turn; `samples` is the number of episodes of a group."""
    seed: int
    stream: int
    """Seed stream of environments, for rows without a seed."""
    scorer: Scorer
    judged: frozenset[str]
    """Domains that have a reward function besides the environment. It scores the policy's turns, or in the domains
    `last_turn` the last one.
    """
    last_turn: frozenset[str] = frozenset()
    after_tools: frozenset[str] = frozenset()
    """Domains of `last_turn` in which an episode that was cut has no answer: its last turn calls a tool."""

    async def sample(self, prompt: Prompt, seed: int | None) -> RolloutGroup:
        """See `GroupSampler`. The group's prompt holds the tokens and the text of the first observation."""
        given = prompt.row.get(SEED)
        of_world = given if isinstance(given, int) else prompt_seed(self.seed, self.stream, prompt.prompt_id)
        seeds = [None if seed is None else sample_seed(seed, number) for number in range(self.sampling.samples)]
        played: Sequence[Episode] = await gather_or_cancel([self.episodes.play(prompt, of_world, own) for own in seeds])
        if prompt.domain in self.judged:
            played = await self._judged(prompt, played)
        return RolloutGroup(observed(prompt, played), played)

    def yields(self, prompt: Prompt, episodes: Sequence[Episode], baseline: Episode | None) -> bool:
        return baseline is None and sampled_so(episodes, self.sampling) and not self._show(episodes)

    def _show(self, episodes: Sequence[Episode]) -> bool:
        """Whether stored episodes show pictures, which are not stored with them."""
        token = self.sampling.placeholder
        paths = [path for episode in episodes for path in episode.trajectories]
        segments = [segment for path in paths for segment in path.segments]
        return token is not None and any((segment.token_ids == token).any() for segment in segments)

    async def _judged(self, prompt: Prompt, played: Sequence[Episode]) -> list[Episode]:
        if not all(map(has_verdict, played)) and self.scorer.compares(prompt):
            return list(played)
        said = [self._said(prompt.domain, episode) for episode in played]
        verdicts = self.scorer.combined(prompt, await self.scorer.score(prompt, said))
        return [
            replace(one, reward=with_verdict(one.reward, verdict))
            for one, verdict in zip(played, verdicts, strict=True)
        ]

    def _said(self, domain: str, episode: Episode) -> str:
        """Return the text that the domain's reward function scores."""
        if domain not in self.last_turn:
            return episode.text
        return "" if domain in self.after_tools and episode.stop in CUT else episode.sampled[-1].text


@dataclass(frozen=True)
class SampledByDomain:
    """Implements `GroupSampler`: samples episodes in domains with an environment, and single turns in all others."""

    episodes: Mapping[str, GroupSampler]
    """Samplers of episodes by domain."""
    single_turns: GroupSampler

    async def sample(self, prompt: Prompt, seed: int | None) -> RolloutGroup:
        return await self._of(prompt).sample(prompt, seed)

    def yields(self, prompt: Prompt, episodes: Sequence[Episode], baseline: Episode | None) -> bool:
        return self._of(prompt).yields(prompt, episodes, baseline)

    def _of(self, prompt: Prompt) -> GroupSampler:
        return self.episodes.get(prompt.domain, self.single_turns)


def with_verdict(earned: RewardResult, verdict: RewardResult) -> RewardResult:
    """Return the sum of the environment's result and the reward function's; without a verdict if either has none."""
    if earned.outcome is not RewardOutcome.SCORED:
        return earned
    parts = {IN_ENVIRONMENT: earned.value, **verdict.parts}
    score = None if verdict.score is None else earned.graded + verdict.score
    return RewardResult(earned.value + verdict.value, verdict.outcome, parts, verdict.note or earned.note, score=score)
