"""Credit assignment: turns a step's experience into the batch for the trainer.

Apart from a small state, this is a pure function of the step. The state holds the adaptive KL coefficient and the
running moments of the rewards, and is saved in checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from pydantic import TypeAdapter

from roll.algorithms.advantages import Normalisation, Scores, advantages, value_targets
from roll.algorithms.kl import adapted_coefficient, token_kl
from roll.algorithms.moments import EPSILON, RunningMoments
from roll.algorithms.shaping import balanced, difficulty_weights, length_weights
from roll.rollout.batch import Experience
from roll.types import Bools, Floats, Metrics, TrainBatch


@dataclass(frozen=True)
class Credit:
    """Settings of credit assignment: how rewards become advantages."""

    estimator: str
    """Name in `ADVANTAGES`, or `package.module:Name`."""
    normalisation: Normalisation
    kl_coef: float = 0.0
    """Weight of the per-token KL to the reference that rewards lose. If it adapts, this is the initial weight."""
    kl_estimator: str = "k1"
    target_kl: float | None = None
    """Target KL, in nats per token, that `kl_coef` is adapted to reach. None keeps the weight constant."""
    kl_horizon: int = 10000
    """Number of responses over which the weight adapts."""
    weigh_difficulty: bool = False
    """Whether hard prompts get a larger weight in the loss."""
    weigh_length: bool = False
    """Whether long responses get a smaller weight in the loss."""
    estimator_args: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the estimator, other than the normalisation."""


@dataclass(frozen=True)
class CreditState:
    """State that one step passes to the next."""

    kl_coef: float
    """KL coefficient of the next step."""
    rewards: RunningMoments = field(default_factory=RunningMoments)
    """Moments of the rewards of all steps so far."""


_STATE = TypeAdapter(CreditState)


class CreditAssignment:
    """Assigns credit to each step in turn and keeps the state between steps."""

    def __init__(self, credit: Credit) -> None:
        self._credit = credit
        self._state = CreditState(credit.kl_coef)

    def __call__(
        self,
        step: Experience,
        ref_log_probs: Floats | None,
        proximal_log_probs: Floats | None = None,
        values: Floats | None = None,
    ) -> tuple[TrainBatch, Metrics]:
        """Return the step's batch and its metrics.

        Args:
            ref_log_probs: [T], log-probs of the reference; None if no term uses them.
            proximal_log_probs: [T], log-probs of the trainer's policy before the step's first update; None if they were
                not computed.
            values: [T], values of the critic before its first update of the step; None without a critic.
        """
        batch, self._state, metrics = train_batch(
            step, ref_log_probs, proximal_log_probs, self._credit, self._state, values
        )
        return batch, metrics

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON-serialisable values."""
        return _STATE.dump_python(self._state, mode="json")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a saved state. Without `target_kl`, the KL coefficient is taken from the configuration instead."""
        saved = _STATE.validate_python(state)
        self._state = saved if self._credit.target_kl else replace(saved, kl_coef=self._credit.kl_coef)


def train_batch(
    step: Experience,
    ref_log_probs: Floats | None,
    proximal_log_probs: Floats | None,
    credit: Credit,
    state: CreditState,
    values: Floats | None = None,
) -> tuple[TrainBatch, CreditState, Metrics]:
    """Return the step's batch with advantages, the state for the next step, and metrics.

    Estimators see each episode as one sequence, so that a reward at its end reaches the tokens of all its trajectories.
    For the arguments see `CreditAssignment`.
    """
    penalties, kl_coef = None, state.kl_coef
    mask = step.sequences.response_mask
    metrics = {
        "reward/shaped_mean": float(step.rewards.mean()),
        "response/masked_fraction": 1.0 - float(_with_any(step, mask).mean()),
    }
    if credit.kl_coef:
        assert ref_log_probs is not None, "a KL term in the reward without reference log-probs"
        log_probs = step.behaviour_log_probs if proximal_log_probs is None else proximal_log_probs
        assert log_probs is not None, "a KL term in the reward without log-probs of the policy"
        kl = token_kl(torch.from_numpy(log_probs), torch.from_numpy(ref_log_probs), credit.kl_estimator).numpy()
        penalties = (state.kl_coef * kl).astype(np.float32)
        mean = float(kl[mask].mean()) if mask.any() else 0.0
        metrics |= {"reward/kl_coef": state.kl_coef, "reward/kl_mean": mean}
        if credit.target_kl:
            kl_coef = adapted_coefficient(state.kl_coef, mean, credit.target_kl, len(step.rewards), credit.kl_horizon)
    running = state.rewards.joined(_clipped(step.rewards, credit.normalisation))
    sums = step.rewards, step.groups, penalties, step.lengths, step.baselines
    scores = Scores(step.episodes, *sums, running, step.turns, values, step.domains)
    if step.turns is not None:
        metrics["response/turns_mean"] = len(step.turns.rewards) / len(step.rewards)
    estimated = advantages(credit.estimator, scores, credit.normalisation, credit.estimator_args)
    metrics["advantage/zero_fraction"] = 1.0 - float(_with_any(step, mask & (np.abs(estimated) > EPSILON)).mean())
    returns = None if values is None else value_targets(scores, credit.normalisation)
    if values is not None and returns is not None:
        metrics |= value_metrics(values[mask], returns[mask])
    batch = TrainBatch(
        step.sequences,
        estimated,
        step.behaviour_log_probs,
        step.policy_versions,
        ref_log_probs,
        proximal_log_probs,
        sequence_weights=sequence_weights(step, credit),
        episode_of_sequence=step.episode_of_sequence,
        values=values,
        returns=returns,
    )
    return batch, CreditState(kl_coef, running), metrics


def value_metrics(values: Floats, returns: Floats) -> Metrics:
    """Return metrics of a critic's values before its update. Both arrays hold the S response tokens, [S].

    The explained variance, 1 - Var(returns - values) / Var(returns), is 1 for a perfect critic, 0 for a constant one,
    and negative for a critic worse than a constant. It is left out if all returns of the step are equal.
    """
    if not len(values):
        return {}
    metrics = {"critic/value_mean": float(values.mean()), "critic/return_mean": float(returns.mean())}
    if spread := float(returns.var(dtype=np.float64)):
        metrics["critic/explained_variance"] = 1.0 - float((returns - values).var(dtype=np.float64)) / spread
    return metrics


def sequence_weights(step: Experience, credit: Credit) -> Floats | None:
    """Return loss weights [N] with a mean of 1 over the episodes in the loss; None without any weighting."""
    if not (credit.weigh_difficulty or credit.weigh_length):
        return None
    weights = np.ones(len(step.rewards), np.float32)
    if credit.weigh_difficulty:
        weights = weights * difficulty_weights(step.difficulties)
    if credit.weigh_length:
        weights = weights * length_weights(step.lengths)
    return balanced(weights, _with_any(step, step.sequences.response_mask))[step.episode_of_sequence]


def _with_any(step: Experience, tokens: Bools) -> Bools:
    """Return which episodes have any of these `tokens` [T], as [E]."""
    return np.logical_or.reduceat(tokens, step.episodes.offsets[:-1])


def _clipped(rewards: Floats, norm: Normalisation) -> Floats:
    bound = None if norm.clips_normalised else norm.reward_clip
    return rewards if bound is None else np.clip(rewards, -bound, bound)
