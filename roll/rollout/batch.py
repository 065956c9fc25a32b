"""Concatenates finished groups into the experience of a step, and computes their metrics. Pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from roll.algorithms.advantages import EpisodeTurns
from roll.algorithms.shaping import Overlong, is_long_and_wrong, overlong_penalty
from roll.errors import RollError
from roll.rollout.record import token_log_probs, token_versions
from roll.rollout.turns import joined_turns
from roll.types import (
    NO_VERDICT,
    Episode,
    Floats,
    Ints,
    Metrics,
    RewardOutcome,
    RolloutGroup,
    Segment,
    Sequences,
    StopReason,
    Trajectory,
)

BROKEN_OFF = (StopReason.ABORTED, StopReason.DEADLINE, StopReason.ENVIRONMENT_FAILED)
"""Stop reasons that the policy did not cause. An episode with one of them has no verdict."""
TRUNCATED = (StopReason.LENGTH, StopReason.MAX_TURNS, StopReason.CONTEXT_FULL)
"""Stop reasons of episodes that a limit cut off."""


@dataclass(frozen=True)
class Shaping:
    """Settings that change rewards and the loss mask before credit is assigned."""

    max_len_mask: bool = False
    """Whether to leave truncated responses out of the loss. They still count in their group's statistics."""
    longest_wrong: int | None = None
    """Wrong responses (score at most 0) of at least this many tokens are left out of the loss."""
    difficulty: tuple[float, float] | None = None
    """Exclusive bounds of a group's mean score (`RewardResult.graded`). Groups outside are left out of the loss."""
    overlong: Overlong | None = None
    """Penalty for long responses."""


@dataclass(frozen=True)
class Experience:
    """All episodes of a step that have a verdict. The trajectories of one episode are adjacent."""

    sequences: Sequences
    """N sequences, one for each trajectory."""
    episode_of_sequence: Ints
    """[N], index of each sequence's episode, not decreasing. Every episode has at least one sequence."""
    rewards: Floats
    """[E], shaped rewards."""
    groups: Ints
    """[E], index of each episode's group."""
    domains: Ints
    """[E], index of the prompt's domain among the domains of the step."""
    behaviour_log_probs: Floats | None
    """[T], log-probs from the engine; None if it did not return them."""
    policy_versions: Ints
    """[T], policy version that sampled each token; 0 for given tokens."""
    lengths: Ints
    """[E], number of sampled tokens, whether or not they are in the loss."""
    difficulties: Floats
    """[E], 1 minus the mean score of the group."""
    baselines: Floats | None
    """[E], shaped reward of the greedy response to the same prompt; None without greedy responses."""
    turns: EpisodeTurns | None = None
    """Rewards of the episodes' turns; None if every episode is one turn."""

    @property
    def episodes(self) -> Sequences:
        """Return one sequence per episode, [E]: its trajectories joined. Advantage estimators sum over these."""
        firsts = np.searchsorted(self.episode_of_sequence, np.arange(len(self.rewards) + 1))
        return replace(self.sequences, offsets=self.sequences.offsets[firsts])


def experience(groups: Sequence[RolloutGroup], shaping: Shaping) -> Experience:
    """Return the experience of a step.

    Episodes without a verdict are left out, and so are all responses to a prompt if its greedy response has no verdict.

    Raises:
        RollError: no response has a verdict.
    """
    compared = [usable(group) for group in groups]
    kept = [(index, episode) for index, episodes in enumerate(compared) for episode in episodes]
    if not kept:
        tried = [
            episode for group in groups for episode in (*group.episodes, *([group.baseline] if group.baseline else ()))
        ]
        notes = {episode.reward.note for episode in tried if not has_verdict(episode)}
        raise RollError(
            f"no response of this step could be scored; the rewards reported: {'; '.join(sorted(notes)[:3])}"
        )
    episodes = [episode for _, episode in kept]
    counts = np.array([len(episodes) for episodes in compared])
    means = _means([episode.reward.graded for episode in episodes], counts)
    trajectories = [trajectory for episode in episodes for trajectory in episode.trajectories]
    for trajectory in trajectories:
        first = trajectory.segments[0]
        assert len(first.token_ids) and not first.sampled, (
            "a trajectory must begin with given tokens: nothing predicts its first one"
        )
    segments = [segment for trajectory in trajectories for segment in trajectory.segments]
    episode_of_sequence = np.repeat(
        np.arange(len(episodes), dtype=np.int32), [len(episode.trajectories) for episode in episodes]
    )
    learns = [_learns(episode, means[index], shaping) for index, episode in kept]
    rewards = _shaped(episodes, shaping)
    baselines = [baseline for index, _ in kept if (baseline := groups[index].baseline) is not None]
    return Experience(
        sequences=_laid_end_to_end(trajectories, segments, np.array(learns)[episode_of_sequence]),
        episode_of_sequence=episode_of_sequence,
        rewards=rewards,
        groups=np.repeat(np.arange(len(groups), dtype=np.int32), counts),
        domains=np.unique([groups[index].prompt.domain for index, _ in kept], return_inverse=True)[1].astype(np.int32),
        behaviour_log_probs=token_log_probs(segments) if _has_log_probs(segments) else None,
        policy_versions=token_versions(segments),
        lengths=_lengths(episodes),
        difficulties=np.repeat(1.0 - np.array(means), counts).astype(np.float32),
        baselines=_shaped(baselines, shaping) if baselines else None,
        turns=joined_turns(episodes, rewards),
    )


def _means(scores: Sequence[float], counts: np.ndarray) -> list[float]:
    """Return the mean score of each group, NaN for an empty one. `counts` holds each group's number of scores."""
    values, ends = np.array(scores, np.float64), np.cumsum(counts)
    bounds = zip((ends - counts).tolist(), ends.tolist(), strict=True)
    return [float(values[begin:end].sum()) / (end - begin) if end > begin else np.nan for begin, end in bounds]


def _has_log_probs(segments: Sequence[Segment]) -> bool:
    has = {segment.log_probs is not None for segment in segments if segment.sampled}
    assert len(has) == 1, "the engine returned log-probs of some responses but not of others"
    return has.pop()


def usable(group: RolloutGroup) -> list[Episode]:
    """Return the group's episodes that have a verdict; no episodes if the group has a baseline without a verdict."""
    if group.baseline is not None and not has_verdict(group.baseline):
        return []
    return [episode for episode in group.episodes if has_verdict(episode)]


def rewards_differ(group: RolloutGroup) -> bool:
    """Whether the rewards of the group differ. If they are equal, a comparison within the group has no gradient."""
    return len({episode.reward.value for episode in usable(group)}) > 1


def failure(group: RolloutGroup) -> str | None:
    """Return the error of the first episode whose environment broke in every attempt; None if there is no such episode.

    A group with such an episode is replaced.
    """
    broken = [episode.reward.note for episode in group.episodes if episode.stop is StopReason.ENVIRONMENT_FAILED]
    return broken[0] if broken else None


def has_verdict(episode: Episode) -> bool:
    """Whether the episode's reward is a verdict on the policy."""
    return episode.reward.outcome not in NO_VERDICT and not any(
        trajectory.stop in BROKEN_OFF for trajectory in episode.trajectories
    )


def _shaped(episodes: Sequence[Episode], shaping: Shaping) -> Floats:
    rewards = np.array([episode.reward.value for episode in episodes], np.float32)
    return rewards if shaping.overlong is None else rewards + overlong_penalty(_lengths(episodes), shaping.overlong)


def _lengths(episodes: Sequence[Episode]) -> Ints:
    return np.array([episode.length for episode in episodes], np.int32)


def _learns(episode: Episode, mean_score: float, shaping: Shaping) -> bool:
    """Whether the episode's sampled tokens enter the loss."""
    learns = not (shaping.max_len_mask and episode.stop in TRUNCATED)
    if shaping.longest_wrong is not None:
        learns = learns and not is_long_and_wrong(episode.reward.graded, episode.length, shaping.longest_wrong)
    if shaping.difficulty is not None:
        low, high = shaping.difficulty
        learns = learns and low < mean_score < high
    return learns


def _laid_end_to_end(trajectories: Sequence[Trajectory], segments: Sequence[Segment], learns: np.ndarray) -> Sequences:
    """Return one sequence for each trajectory.

    Args:
        segments: the segments of all trajectories, in order.
        learns: for each trajectory, whether its sampled tokens enter the loss.
    """
    lengths = np.array([len(segment.token_ids) for segment in segments])
    counts = np.array([len(trajectory.segments) for trajectory in trajectories])
    offsets = np.concatenate([[0], np.cumsum(lengths)[np.cumsum(counts) - 1]]).astype(np.int64)
    in_loss = np.array([segment.sampled for segment in segments]) & np.repeat(learns, counts)
    token_ids = np.concatenate([segment.token_ids for segment in segments], dtype=np.int32)
    return Sequences(token_ids, offsets, np.repeat(in_loss, lengths))


def rollout_metrics(groups: Sequence[RolloutGroup], policy_version: int) -> Metrics:
    """Return metrics of a step's episodes: rewards by domain, outcomes, lengths, staleness. Only verdicts count."""
    episodes = [episode for group in groups for episode in group.episodes]
    scored = [episode for episode in episodes if has_verdict(episode)]
    rewards = np.array([episode.reward.value for episode in scored])
    lengths = np.array([episode.length for episode in episodes])
    runs = [run for episode in episodes for segment in episode.sampled for run in segment.versions if run.tokens]
    ages, tokens = policy_version - np.array([run.version for run in runs]), np.array([run.tokens for run in runs])
    outcomes = Counter(episode.reward.outcome for episode in episodes)
    metrics = {"reward/mean": float(rewards.mean()), "reward/std": float(rewards.std())} if scored else {}
    metrics |= {
        "reward/equal_groups_fraction": equal_groups_fraction(groups),
        "response/length_mean": float(lengths.mean()),
        "response/length_max": float(lengths.max()),
        "response/at_limit_fraction": at_limit_fraction(episodes),
        "response/truncated_fraction": sum(episode.stop in TRUNCATED for episode in episodes) / len(episodes),
        "staleness/mean": float(ages @ tokens / tokens.sum()),
        "staleness/min": float(ages.min()),
        "staleness/max": float(ages.max()),
    }
    for outcome in RewardOutcome:
        metrics[f"reward/{outcome.value}_fraction"] = outcomes[outcome] / len(episodes)
    for domain in sorted({group.prompt.domain for group in groups}):
        results = [
            e.reward for group in groups if group.prompt.domain == domain for e in group.episodes if has_verdict(e)
        ]
        if results:
            metrics[f"reward/{domain}/mean"] = float(np.mean([result.value for result in results]))
        for part in sorted({name for result in results for name in result.parts}):
            values = [result.parts[part] for result in results if part in result.parts]
            metrics[f"reward/{domain}/{part}/mean"] = float(np.mean(values))
    return metrics


def equal_groups_fraction(groups: Sequence[RolloutGroup]) -> float:
    """Return the share of groups whose rewards with a verdict are all equal.

    Estimators that compare the responses of a group learn nothing from such a group.
    """
    return sum(len({e.reward.value for e in group.episodes if has_verdict(e)}) <= 1 for group in groups) / len(groups)


def at_limit_fraction(episodes: Sequence[Episode]) -> float:
    """Return the share of episodes whose last response reached the length limit."""
    return sum(episode.stop is StopReason.LENGTH for episode in episodes) / len(episodes)


def token_count(groups: Sequence[RolloutGroup]) -> int:
    """Return the number of given and sampled tokens of all trajectories. Greedy responses do not count."""
    paths = [trajectory for group in groups for episode in group.episodes for trajectory in episode.trajectories]
    return sum(len(segment.token_ids) for trajectory in paths for segment in trajectory.segments)
