"""Finished groups to experience laid end to end, and what there is to say of them. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from roll.algorithms.returns import Turns
from roll.algorithms.shaping import Overlong, is_long_and_wrong, overlong_penalty
from roll.data.packing import concatenate
from roll.errors import RollError
from roll.rollout.turns import joined_turns
from roll.types import Bools, FinishReason, Floats, Ints, Metrics, RewardOutcome, Rollout, RolloutGroup, Sequences

NO_VERDICT = (RewardOutcome.CRASHED, RewardOutcome.TIMED_OUT)


@dataclass(frozen=True)
class Shaping:
    """What becomes of rewards, and of responses' place in the loss, before credit is assigned."""

    max_len_mask: bool = False
    """Truncated responses count in their group's statistics but not in the loss."""
    longest_wrong: int | None = None
    """Nor do wrong responses, those with a reward not above 0, of so many tokens or more."""
    difficulty: tuple[float, float] | None = None
    """Nor do the responses of a group whose mean reward is not between these two."""
    overlong: Overlong | None = None
    """Long responses lose some of their reward."""


@dataclass(frozen=True)
class Experience:
    """A step's rollouts that can be learnt from, laid end to end."""

    sequences: Sequences
    rewards: Floats
    """[N], shaped."""
    groups: Ints
    """[N], index of the group."""
    behaviour_log_probs: Floats | None
    """[T]; None where the engine was not asked for them."""
    policy_versions: Ints
    """[T]"""
    lengths: Ints
    """[N], response tokens, in the loss or not."""
    difficulties: Floats
    """[N], 1 less the mean of the group's rewards before shaping."""
    baselines: Floats | None
    """[N], shaped reward of the greedy response to the same prompt; None if there are none."""
    turns: Turns | None = None
    """What parts of the responses earned; None where every response is one turn."""


def experience(groups: Sequence[RolloutGroup], shaping: Shaping) -> Experience:
    """Lay rollouts end to end. A response that got no verdict is left out: its reward says nothing of the policy.

    So is every response to a prompt whose greedy response got none.

    Raises:
        RollError: no response got a verdict.
    """
    kept = [(index, group, rollout) for index, group in enumerate(groups) for rollout in usable(group)]
    if not kept:
        notes = {rollout.reward.note for group in groups for rollout in group.rollouts}
        raise RollError(f"no response of this step could be scored; the rewards said: {'; '.join(sorted(notes)[:3])}")

    def per_token(field: str, dtype: type[np.generic]) -> np.ndarray:
        parts = [(np.zeros(len(group.prompt.token_ids), dtype), getattr(rollout.completion, field)) for _, group, rollout in kept]
        return np.concatenate([part for pair in parts for part in pair]).astype(dtype)

    means = {index: float(np.mean([rollout.reward.value for rollout in usable(groups[index])])) for index, _, _ in kept}
    rewards = _shaped([rollout for _, _, rollout in kept], shaping)
    baselines = [group.baseline for _, group, _ in kept if group.baseline is not None]
    return Experience(
        sequences=concatenate(
            [np.concatenate([group.prompt.token_ids, rollout.completion.token_ids]) for _, group, rollout in kept],
            [_mask(group, rollout, means[index], shaping) for index, group, rollout in kept],
        ),
        rewards=rewards,
        groups=np.array([index for index, _, _ in kept], np.int32),
        behaviour_log_probs=per_token("log_probs", np.float32) if _has_log_probs(kept[0][2]) else None,
        policy_versions=per_token("policy_versions", np.int32),
        lengths=_lengths([rollout for _, _, rollout in kept]),
        difficulties=np.array([1.0 - means[index] for index, _, _ in kept], np.float32),
        baselines=_shaped(baselines, shaping) if baselines else None,
        turns=joined_turns([rollout for _, _, rollout in kept], [len(group.prompt.token_ids) for _, group, _ in kept], rewards),
    )


def _has_log_probs(rollout: Rollout) -> bool:
    return rollout.completion.log_probs is not None


def usable(group: RolloutGroup) -> list[Rollout]:
    """The group's responses that say something of the policy; none if there is nothing to compare them with."""
    if group.baseline is not None and not _has_verdict(group.baseline):
        return []
    return [rollout for rollout in group.rollouts if _has_verdict(rollout)]


def rewards_differ(group: RolloutGroup) -> bool:
    """Whether a comparison within the group can teach anything."""
    return len({rollout.reward.value for rollout in usable(group)}) > 1


def _has_verdict(rollout: Rollout) -> bool:
    return rollout.reward.outcome not in NO_VERDICT and rollout.completion.finish_reason is not FinishReason.ABORT


def _shaped(rollouts: Sequence[Rollout], shaping: Shaping) -> Floats:
    rewards = np.array([rollout.reward.value for rollout in rollouts], np.float32)
    return rewards if shaping.overlong is None else rewards + overlong_penalty(_lengths(rollouts), shaping.overlong)


def _lengths(rollouts: Sequence[Rollout]) -> Ints:
    return np.array([len(rollout.completion.token_ids) for rollout in rollouts], np.int32)


def _mask(group: RolloutGroup, rollout: Rollout, mean_reward: float, shaping: Shaping) -> Bools:
    learns = not (shaping.max_len_mask and rollout.completion.finish_reason is FinishReason.LENGTH)
    if shaping.longest_wrong is not None:
        learns = learns and not is_long_and_wrong(rollout.reward.value, len(rollout.completion.token_ids), shaping.longest_wrong)
    if shaping.difficulty is not None:
        low, high = shaping.difficulty
        learns = learns and low < mean_reward < high
    return np.concatenate([np.zeros(len(group.prompt.token_ids), np.bool_), np.full(len(rollout.completion.token_ids), learns)])


def rollout_metrics(groups: Sequence[RolloutGroup], policy_version: int) -> Metrics:
    """Rewards by domain, outcomes, lengths and staleness of a step's rollouts."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    scored = [rollout for rollout in rollouts if _has_verdict(rollout)]
    rewards = np.array([rollout.reward.value for rollout in scored] or [np.nan])
    lengths = np.array([len(rollout.completion.token_ids) for rollout in rollouts])
    age = policy_version - np.concatenate([rollout.completion.policy_versions for rollout in rollouts])
    metrics = {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "response/length_mean": float(lengths.mean()),
        "response/length_max": float(lengths.max()),
        "response/truncated_fraction": _share(rollouts, lambda rollout: rollout.completion.finish_reason is FinishReason.LENGTH),
        "staleness/mean": float(age.mean()),
        "staleness/max": float(age.max()),
    }
    for outcome in RewardOutcome:
        metrics[f"reward/{outcome.value}_fraction"] = _share(rollouts, lambda rollout, o=outcome: rollout.reward.outcome is o)
    for domain in sorted({group.prompt.domain for group in groups}):
        values = [r.reward.value for group in groups if group.prompt.domain == domain for r in group.rollouts if _has_verdict(r)]
        if values:
            metrics[f"reward/{domain}/mean"] = float(np.mean(values))
    return metrics


def token_count(groups: Sequence[RolloutGroup]) -> int:
    """Prompt and response tokens of every sample."""
    return sum(len(group.prompt.token_ids) + len(rollout.completion.token_ids) for group in groups for rollout in group.rollouts)


def _share(rollouts: Sequence[Rollout], condition: Callable[[Rollout], bool]) -> float:
    return sum(map(condition, rollouts)) / len(rollouts)
