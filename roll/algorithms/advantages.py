"""Advantages: from the rewards of a step to one number a response token. Pure functions of numpy arrays.

Every estimator maps `Returns` to [T] advantages and stands in `ADVANTAGES` under its `adv_estimator` name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from roll.registry import Registry
from roll.types import Floats, Ints, Sequences

EPSILON = 1e-6
Scope = Literal["batch", "group"] | None


@dataclass(frozen=True)
class Scores:
    """The rewards of one step's responses."""

    sequences: Sequences
    """N responses with their prompts."""
    rewards: Floats
    """[N]"""
    groups: Ints
    """[N], which prompt each response answers."""
    token_penalties: Floats | None = None
    """[T], subtracted from the reward of each token (KL in the reward); None for none."""


@dataclass(frozen=True)
class Normalisation:
    """What the estimators do to rewards and advantages besides their own formula."""

    mean: Scope = None
    """`reinforce`: over what the mean reward is taken that is subtracted."""
    std: Scope = None
    """`reinforce`: over what the standard deviation is taken that rewards are divided by."""
    gamma: float = 1.0
    whiten: bool = False
    reward_clip: float | None = None
    advantage_clip: float | None = None


Estimator = Callable[[Scores, Normalisation], Floats]
ADVANTAGES: Registry[Estimator] = Registry("advantage estimator")


@ADVANTAGES.register("grpo")
def grpo(scores: Scores, norm: Normalisation) -> Floats:
    """Group relative policy optimisation: (r - mean(group)) / (std(group) + eps), the same on every token of a response.

    The standard deviation is the sample's (n - 1). Source: DeepSeekMath, arXiv 2402.03300, section 4.1.2.
    """
    rewards = _standardise(scores.rewards, scores.groups, "group", "group")
    return _to_tokens(rewards, scores, gamma=1.0)


@ADVANTAGES.register("reinforce")
def reinforce(scores: Scores, norm: Normalisation) -> Floats:
    """REINFORCE: the discounted sum of rewards from each token on (Williams, 1992), optionally normalised first."""
    rewards = _standardise(scores.rewards, scores.groups, norm.mean, norm.std)
    return _to_tokens(rewards, scores, norm.gamma)


def advantages(estimator: str, scores: Scores, norm: Normalisation) -> Floats:
    """[T] advantages by the named estimator, with clipping and whitening around it; 0 outside the response mask."""
    if norm.reward_clip is not None:
        clipped = np.clip(scores.rewards, -norm.reward_clip, norm.reward_clip)
        scores = Scores(scores.sequences, clipped, scores.groups, scores.token_penalties)
    result = ADVANTAGES[estimator](scores, norm)
    mask = scores.sequences.response_mask
    if norm.whiten and mask.any():
        result = np.where(mask, (result - result[mask].mean()) / (result[mask].std() + EPSILON), 0.0)
    if norm.advantage_clip is not None:
        result = np.clip(result, -norm.advantage_clip, norm.advantage_clip)
    return result.astype(np.float32)


def _standardise(rewards: Floats, groups: Ints, mean: Scope, std: Scope) -> Floats:
    """Rewards less their mean and over their standard deviation, each over the batch, over the group or not at all."""
    values = rewards.astype(np.float64)
    shift = _moment(values, groups, mean, np.mean) if mean else 0.0
    scale = _moment(values, groups, std, _sample_std) + EPSILON if std else 1.0
    return ((values - shift) / scale).astype(np.float32)


def _moment(values: np.ndarray, groups: Ints, scope: Scope, reduce: Callable[[np.ndarray], float]) -> np.ndarray:
    if scope == "batch":
        return np.full_like(values, reduce(values))
    out = np.empty_like(values)
    for group in np.unique(groups):
        out[groups == group] = reduce(values[groups == group])
    return out


def _sample_std(values: np.ndarray) -> float:
    return float(values.std(ddof=1)) if len(values) > 1 else 0.0


def _to_tokens(rewards: Floats, scores: Scores, gamma: float) -> Floats:
    """Reward at each response's last token, penalties on every token, summed (discounted) from each token to the end."""
    sequences = scores.sequences
    out = np.zeros(len(sequences.token_ids), np.float64)
    for index, reward in enumerate(rewards):
        begin, end = sequences.offsets[index], sequences.offsets[index + 1]
        where = begin + np.flatnonzero(sequences.response_mask[begin:end])
        if not len(where):
            continue
        immediate = np.zeros(len(where)) if scores.token_penalties is None else -scores.token_penalties[where].astype(np.float64)
        immediate[-1] += reward
        if gamma == 1.0:
            out[where] = immediate[::-1].cumsum()[::-1]
        else:
            powers = gamma ** np.arange(len(where))
            out[where] = [float(immediate[t:] @ powers[: len(where) - t]) for t in range(len(where))]
    return out.astype(np.float32)
