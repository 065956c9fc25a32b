"""Finished groups to the batch that the trainer learns from, and what there is to say of them. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from roll.algorithms.advantages import Normalisation, Scores, advantages
from roll.algorithms.kl import kl_estimate
from roll.data.packing import concatenate
from roll.errors import RollError
from roll.types import Bools, FinishReason, Floats, Ints, Metrics, RewardOutcome, Rollout, RolloutGroup, Sequences, TrainBatch

NO_VERDICT = (RewardOutcome.CRASHED, RewardOutcome.TIMED_OUT)


@dataclass(frozen=True)
class Experience:
    """A step's rollouts that can be learnt from, laid end to end."""

    sequences: Sequences
    rewards: Floats
    """[N]"""
    groups: Ints
    """[N], index of the group."""
    behaviour_log_probs: Floats | None
    """[T]; None where the engine was not asked for them."""
    policy_versions: Ints
    """[T]"""


def experience(groups: Sequence[RolloutGroup], max_len_mask: bool) -> Experience:
    """Lay rollouts end to end. A response that got no verdict is left out: its reward says nothing of the policy.

    Args:
        max_len_mask: truncated responses count in their group's statistics but not in the loss.

    Raises:
        RollError: no response got a verdict.
    """
    kept = [(index, group, rollout) for index, group in enumerate(groups) for rollout in group.rollouts if _usable(rollout)]
    if not kept:
        notes = {rollout.reward.note for group in groups for rollout in group.rollouts}
        raise RollError(f"no response of this step could be scored; the rewards said: {'; '.join(sorted(notes)[:3])}")

    def per_token(field: str, dtype: type[np.generic]) -> np.ndarray:
        parts = [(np.zeros(len(group.prompt.token_ids), dtype), getattr(rollout.completion, field)) for _, group, rollout in kept]
        return np.concatenate([part for pair in parts for part in pair]).astype(dtype)

    return Experience(
        sequences=concatenate(
            [np.concatenate([group.prompt.token_ids, rollout.completion.token_ids]) for _, group, rollout in kept],
            [_mask(group, rollout, max_len_mask) for _, group, rollout in kept],
        ),
        rewards=np.array([rollout.reward.value for _, _, rollout in kept], np.float32),
        groups=np.array([index for index, _, _ in kept], np.int32),
        behaviour_log_probs=per_token("log_probs", np.float32) if _has_log_probs(kept[0][2]) else None,
        policy_versions=per_token("policy_versions", np.int32),
    )


def _has_log_probs(rollout: Rollout) -> bool:
    return rollout.completion.log_probs is not None


def _usable(rollout: Rollout) -> bool:
    return rollout.reward.outcome not in NO_VERDICT and rollout.completion.finish_reason is not FinishReason.ABORT


def _mask(group: RolloutGroup, rollout: Rollout, max_len_mask: bool) -> Bools:
    learns = not (max_len_mask and rollout.completion.finish_reason is FinishReason.LENGTH)
    return np.concatenate([np.zeros(len(group.prompt.token_ids), np.bool_), np.full(len(rollout.completion.token_ids), learns)])


@dataclass(frozen=True)
class Credit:
    """How rewards become advantages."""

    estimator: str
    """Name in `ADVANTAGES`."""
    normalisation: Normalisation
    kl_coef: float = 0.0
    """Weight of the KL to the reference that is subtracted from the reward, token by token."""
    kl_estimator: str = "k1"


def train_batch(step: Experience, ref_log_probs: Floats | None, credit: Credit, proximal_log_probs: Floats | None = None) -> TrainBatch:
    """Advantages joined to the step's sequences.

    Args:
        ref_log_probs: [T]; None if no term uses it.
        proximal_log_probs: [T], the trainer's before the step's first update; None if that pass was not run.
    """
    penalties = None
    if credit.kl_coef:
        assert ref_log_probs is not None, "a KL term in the reward without reference log-probs"
        log_probs = step.behaviour_log_probs if proximal_log_probs is None else proximal_log_probs
        assert log_probs is not None, "a KL term in the reward without log-probs of the policy"
        kl = kl_estimate(torch.from_numpy(log_probs), torch.from_numpy(ref_log_probs), credit.kl_estimator)
        penalties = (credit.kl_coef * kl).numpy()
    scores = Scores(step.sequences, step.rewards, step.groups, penalties)
    estimated = advantages(credit.estimator, scores, credit.normalisation)
    return TrainBatch(step.sequences, estimated, step.behaviour_log_probs, step.policy_versions, ref_log_probs, proximal_log_probs)


def rollout_metrics(groups: Sequence[RolloutGroup], policy_version: int) -> Metrics:
    """Rewards by domain, outcomes, lengths and staleness of a step's rollouts."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    scored = [rollout for rollout in rollouts if _usable(rollout)]
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
        values = [r.reward.value for group in groups if group.prompt.domain == domain for r in group.rollouts if _usable(r)]
        if values:
            metrics[f"reward/{domain}/mean"] = float(np.mean(values))
    return metrics


def token_count(groups: Sequence[RolloutGroup]) -> int:
    """Prompt and response tokens of every sample."""
    return sum(len(group.prompt.token_ids) + len(rollout.completion.token_ids) for group in groups for rollout in group.rollouts)


def _share(rollouts: Sequence[Rollout], condition: Callable[[Rollout], bool]) -> float:
    return sum(map(condition, rollouts)) / len(rollouts)
