"""Helpers that make prompts, episodes and groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from roll.rollout.record import given, version_runs
from roll.types import Episode, Prompt, RewardOutcome, RewardResult, RolloutGroup, Segment, StopReason, Trajectory


class EachByItself:
    """A scorer that scores each response alone, without comparing the responses of a group."""

    def compares(self, prompt: Prompt) -> bool:
        return False

    def combined(self, prompt: Prompt, results: Sequence[RewardResult]) -> Sequence[RewardResult]:
        return results


def kept_nowhere(name: str, groups: Sequence[RolloutGroup]) -> None:
    """Discard the groups of an `Evaluator`."""


def make_prompt(prompt_id: int, token_ids: Sequence[int] = (1, 2), domain: str = "sums") -> Prompt:
    return Prompt(prompt_id, np.array(token_ids, np.int32), f"prompt {prompt_id}", domain, {"number": prompt_id})


def sampled(
    token_ids: Sequence[int],
    log_probs: Sequence[float] | None = None,
    versions: Sequence[int] | None = None,
    text: str = "text",
) -> Segment:
    count = len(token_ids)
    return Segment(
        np.array(token_ids, np.int32),
        True,
        np.array([-1.0] * count if log_probs is None else log_probs, np.float32),
        version_runs(np.array([0] * count if versions is None else versions, np.int32)),
        text,
    )


def observed(token_ids: Sequence[int], text: str = "given") -> Segment:
    """Return a segment of given tokens, such as an observation."""
    return given(np.array(token_ids, np.int32), text)


def make_trajectory(*segments: Segment, stop: StopReason = StopReason.COMPLETED) -> Trajectory:
    return Trajectory(segments, stop)


def make_episode(
    token_ids: Sequence[int],
    reward: float = 0.0,
    *,
    log_probs: Sequence[float] | None = None,
    versions: Sequence[int] | None = None,
    stop: StopReason = StopReason.COMPLETED,
    outcome: RewardOutcome = RewardOutcome.SCORED,
    note: str = "",
) -> Episode:
    """Return an episode with one response. It has no prompt; `make_group` adds one."""
    return Episode(
        [make_trajectory(sampled(token_ids, log_probs, versions), stop=stop)], RewardResult(reward, outcome, note=note)
    )


def make_group(
    prompt_id: int,
    episodes: Sequence[Episode],
    token_ids: Sequence[int] = (1, 2),
    domain: str = "sums",
    baseline: Episode | None = None,
) -> RolloutGroup:
    prompt = make_prompt(prompt_id, token_ids, domain)

    def answering(episode: Episode) -> Episode:
        first, *others = episode.trajectories
        return replace(
            episode,
            trajectories=[replace(first, segments=[given(prompt.token_ids, prompt.text), *first.segments]), *others],
        )

    return RolloutGroup(prompt, [answering(episode) for episode in episodes], baseline and answering(baseline))
