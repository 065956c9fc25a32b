"""Computes advantages of response tokens from the rewards of a step. Pure functions of numpy arrays.

Every estimator maps `Scores` to [T] advantages and stands in `ADVANTAGES` under its `adv_estimator` name. r is a response's
reward, the means run over the responses to the same prompt. Except where a discount is named, every token of a response gets the
same advantage, less the penalties from it to the end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from roll.algorithms.best_of import added_to_best
from roll.algorithms.moments import EPSILON, Doubles, RunningMoments, Scope, by_group, standardise, whiten
from roll.algorithms.returns import Turns, discounted, discounted_end, gae, turn_returns, undivided
from roll.registry import Registry
from roll.types import Floats, Ints, Sequences


@dataclass(frozen=True)
class Scores:
    """The rewards of one step's responses."""

    sequences: Sequences
    """N responses, as sequences with their prompts."""
    rewards: Floats
    """[N]"""
    groups: Ints
    """[N], index of each response's prompt."""
    token_penalties: Floats | None = None
    """[T], subtracted from the reward of each token (KL in the reward), or None."""
    lengths: Ints | None = None
    """[N], number of response tokens, in the loss or not, which are the weights of `opo`. None counts the response mask."""
    baselines: Floats | None = None
    """[N], reward of the greedy response to the same prompt, which `remax` requires."""
    running: RunningMoments | None = None
    """Moments of all rewards so far, including these. Required if a scope is `running`."""
    turns: Turns | None = None
    """`step_reinforce`, `gigpo`: rewards of the responses' turns. None if every response is one turn."""
    values: Floats | None = None
    """[T], the critic's value before each token, which `gae` requires."""
    domains: Ints | None = None
    """[N], the domain of each response's prompt. Required if a scope is `domain`."""


@dataclass(frozen=True)
class Normalisation:
    """Processing of rewards and advantages around the estimator's own formula."""

    mean: Scope = None
    """Scope of the subtracted mean: of rewards (`reinforce`), of turns' returns (`step_reinforce`)."""
    std: Scope = None
    """Scope of the dividing standard deviation, likewise."""
    gamma: float = 1.0
    """`reinforce`, `reinforce_plus_plus`, `remax`, `gae`: discount of later tokens' rewards; `step_reinforce`: of later turns'."""
    lambd: float = 0.95
    """`gae`: weight of the errors of later values."""
    whiten: bool = False
    reward_clip: float | None = None
    advantage_clip: float | None = None


Estimator = Callable[..., Doubles]
"""Called as `estimator(scores: Scores, norm: Normalisation, **own)`, with the keys of the user's own."""
ADVANTAGES: Registry[Estimator] = Registry("advantage estimator")


@ADVANTAGES.register("grpo")
def grpo(scores: Scores, norm: Normalisation) -> Doubles:
    """Group relative policy optimisation: (r - mean) / (std + 1e-6), with the sample's standard deviation (n - 1).

    In a group whose standard deviation is at most 1e-6 it is r - mean; see `standardise`.

    Source: DeepSeekMath, arXiv 2402.03300, section 4.1.2.
    """
    return to_tokens(standardise(scores.rewards, scores.groups, "group", "group"), scores)


@ADVANTAGES.register("dr_grpo")
def dr_grpo(scores: Scores, norm: Normalisation) -> Doubles:
    """GRPO done right: r - mean. Without the division, questions that are almost solved or almost hopeless weigh no more than others.

    Source: Liu et al., arXiv 2503.20783, section 3.2; its aggregation is `seq-mean-token-sum-norm`.
    """
    return to_tokens(_centred(scores), scores)


@ADVANTAGES.register("rloo")
def rloo(scores: Scores, norm: Normalisation) -> Doubles:
    """REINFORCE leave-one-out: r less the mean of the group's other rewards, which is (r - mean) n / (n - 1). 0 in a group of one.

    Source: Ahmadian et al., arXiv 2402.14740.
    """
    size = by_group(scores.rewards, scores.groups, len)
    return to_tokens(_centred(scores) * size / np.maximum(size - 1, 1), scores)


@ADVANTAGES.register("reinforce")
def reinforce(scores: Scores, norm: Normalisation) -> Doubles:
    """REINFORCE: the discounted sum of rewards from each token on (Williams, 1992), optionally normalised first."""
    rewards = standardise(scores.rewards, scores.groups, norm.mean, norm.std, scores.running, scores.domains)
    return to_tokens(rewards, scores, norm.gamma)


@ADVANTAGES.register("step_reinforce")
def step_reinforce(scores: Scores, norm: Normalisation) -> Doubles:
    """REINFORCE with rewards for turns: each token gets the return of its turn, optionally normalised over turns first.

    As ROLL's estimator of this name. Penalties are summed over a turn and discounted as its reward is.
    """
    mask, turns = scores.sequences.response_mask, scores.turns or undivided(scores.sequences, scores.rewards)
    domains = None if scores.domains is None else scores.domains[turns.rows]
    earned = turn_returns(turns.rewards, turns.rows, norm.gamma)
    returns = standardise(earned, scores.groups[turns.rows], norm.mean, norm.std, domains=domains)
    if scores.token_penalties is not None:
        penalties = np.bincount(turns.of_token[mask], scores.token_penalties[mask], len(returns))
        returns = returns - turn_returns(penalties, turns.rows, norm.gamma)
    return np.where(mask, returns[turns.of_token], 0.0)


@ADVANTAGES.register("gigpo")
def gigpo(
    scores: Scores,
    norm: Normalisation,
    episode_reward_weight: float = 1.0,
    step_reward_weight: float = 1.0,
    step_reward_gamma: float = 0.95,
    gigpo_std: bool = True,
) -> Doubles:
    """Group-in-group policy optimisation: an episode is compared with its group, and each turn with those taken in the same state.

    A = w_E (r - mean) / F + w_S (G_k - mean) / F. The first mean runs over the group's rewards, the second over the returns G_k of all
    turns of the group that were taken in the turn's state. A turn whose state no other turn has seen gets the first term alone.

    Source: Feng et al., arXiv 2505.10978, eq. 3 to 8.

    Args:
        step_reward_gamma: discount of later turns' rewards in G_k.
        gigpo_std: F is the standard deviation of what is compared, as in `grpo`; otherwise it is 1.
    """
    turns, std = scores.turns or undivided(scores.sequences, scores.rewards), "group" if gigpo_std else None
    by_episode = to_tokens(episode_reward_weight * standardise(scores.rewards, scores.groups, "group", std), scores)
    returns = turn_returns(turns.rewards, turns.rows, step_reward_gamma)
    by_turn = step_reward_weight * standardise(returns, _anchors(turns, scores.groups), "group", std)
    return by_episode + np.where(scores.sequences.response_mask, by_turn[turns.of_token], 0.0)


def _anchors(turns: Turns, groups: Ints) -> Ints:
    """Return [K] numbers, equal for turns of a group in the same state."""
    if turns.states is None:
        return np.arange(len(turns.rows), dtype=np.int32)
    pairs = np.stack([groups[turns.rows], turns.states])
    return np.unique(pairs, axis=1, return_inverse=True)[1].reshape(-1).astype(np.int32)


@ADVANTAGES.register("reinforce_plus_plus")
def reinforce_plus_plus(scores: Scores, norm: Normalisation) -> Doubles:
    """REINFORCE++: discounted returns, whitened over all response tokens of the step. No groups are needed.

    Source: Hu et al., arXiv 2501.03262, with the KL in the reward.
    """
    return whiten(to_tokens(scores.rewards, scores, norm.gamma), scores.sequences.response_mask)


@ADVANTAGES.register("reinforce_plus_plus_baseline")
def reinforce_plus_plus_baseline(scores: Scores, norm: Normalisation) -> Doubles:
    """REINFORCE++ with a baseline: r - mean, whitened over all response tokens of the step.

    Source: Hu et al., arXiv 2501.03262, with the KL in the loss, estimated by k2.
    """
    return whiten(to_tokens(_centred(scores), scores), scores.sequences.response_mask)


@ADVANTAGES.register("remax")
def remax(scores: Scores, norm: Normalisation) -> Doubles:
    """ReMax: the discounted sum of rewards from each token on, less the reward of the greedy response to the same prompt.

    Source: Li et al., arXiv 2310.10505.
    """
    assert scores.baselines is not None, "remax without greedy responses"
    returns = to_tokens(scores.rewards, scores, norm.gamma)
    baselines = np.repeat(scores.baselines.astype(np.float64), scores.sequences.lengths)
    return np.where(scores.sequences.response_mask, returns - baselines, 0.0)


@ADVANTAGES.register("opo")
def opo(scores: Scores, norm: Normalisation) -> Doubles:
    """On-policy RL with the optimal baseline: r less the group's mean reward weighted by length, sum(l r) / sum(l).

    The baseline of least variance where a response's gradient grows as the square root of its length l in tokens.
    Source: Hao et al., arXiv 2505.23585.
    """
    lengths = response_lengths(scores).astype(np.float64)
    paid = by_group(lengths * scores.rewards, scores.groups, np.sum)
    baseline = paid / np.maximum(by_group(lengths, scores.groups, np.sum), 1)
    return to_tokens(scores.rewards - baseline, scores)


@ADVANTAGES.register("gpg")
def gpg(scores: Scores, norm: Normalisation) -> Doubles:
    """Group policy gradient: alpha (r - mean) with alpha = N / (N - M), M the responses of groups whose rewards are all equal.

    Such groups have no gradient; alpha makes the mean that of the other responses alone.
    Source: Chu et al., arXiv 2504.02546.
    """
    differ = by_group(scores.rewards, scores.groups, np.ptp) > 0
    return to_tokens(_centred(scores) * len(differ) / max(int(differ.sum()), 1), scores)


@ADVANTAGES.register("maxrl")
def maxrl(scores: Scores, norm: Normalisation) -> Doubles:
    """Maximum likelihood RL: (r - mean) / mean. 0 in a group whose mean is not above 1e-6, which has no success.

    With rewards of 0 and 1, a success rate p and n responses its expected gradient is that of the first n - 1 terms of
    log p = -sum_k (1 - p)^k / k, of which the first alone is what the other estimators raise. Source: Tajwar et al., arXiv 2602.02710.
    """
    mean = by_group(scores.rewards, scores.groups, np.mean)
    return to_tokens(np.where(mean > EPSILON, _centred(scores) / np.maximum(mean, EPSILON), 0.0), scores)


@ADVANTAGES.register("pass_at_k")
def pass_at_k(scores: Scores, norm: Normalisation, pass_k: int = 4) -> Doubles:
    """Pass@k policy optimisation: k times the response's mean addition to the best of k - 1 others of its group, over all choices of them.

    REINFORCE then has the unbiased gradient of the expected largest of k rewards, which is pass@k for rewards of 0 and 1. A right
    response gets more if fewer others are right, and a wrong one gets 0. In a group of fewer than k responses, k is their number.

    Source: Walder and Karkhanis, arXiv 2505.15201 (loo-1), for a loss that is a mean over the n responses: n times the paper's.
    """
    added = np.zeros(len(scores.rewards))
    for group in np.unique(scores.groups):
        members = np.flatnonzero(scores.groups == group)
        k = min(pass_k, len(members))
        if k > 1:
            added[members] = k * added_to_best(scores.rewards[members], k)
    return to_tokens(added, scores)


@ADVANTAGES.register("gae")
def generalised(scores: Scores, norm: Normalisation) -> Doubles:
    """Generalised advantage estimation: sums of the errors of the critic's values, weighted by (gamma lambda)^distance.

    Nothing follows a response's last token, whether the model ended it or it was truncated: the value behind it is 0.
    Source: Schulman et al., arXiv 1506.02438, eq. 16; as PPO, arXiv 1707.06347, section 5, uses it.
    """
    return _gae(scores, norm)[0]


def advantages(estimator: str, scores: Scores, norm: Normalisation, own: Mapping[str, Any] | None = None) -> Floats:
    """Return advantages [T] by the named estimator, with clipping and whitening; 0 outside the response mask.

    Args:
        estimator: A name in `ADVANTAGES`, or `package.module:Name`.
        own: Values of the keys of the estimator alone.
    """
    result = ADVANTAGES.find(estimator)(clipped(scores, norm), norm, **(own or {}))
    if norm.whiten:
        result = whiten(result, scores.sequences.response_mask)
    if norm.advantage_clip is not None:
        result = np.clip(result, -norm.advantage_clip, norm.advantage_clip)
    return result.astype(np.float32)


def value_targets(scores: Scores, norm: Normalisation) -> Floats:
    """Return the critic's targets [T] for `gae`: its values plus the advantages before whitening and clipping. 0 outside the mask."""
    return _gae(clipped(scores, norm), norm)[1].astype(np.float32)


def _gae(scores: Scores, norm: Normalisation) -> tuple[Doubles, Doubles]:
    assert scores.values is not None, "gae without values"
    return gae(token_rewards(scores.rewards, scores), scores.values, scores.sequences, norm.gamma, norm.lambd)


def clipped(scores: Scores, norm: Normalisation) -> Scores:
    """Clip the scores' rewards to `reward_clip`."""
    if norm.reward_clip is None:
        return scores
    bound = norm.reward_clip
    baselines = None if scores.baselines is None else np.clip(scores.baselines, -bound, bound)
    turns = scores.turns and replace(scores.turns, rewards=np.clip(scores.turns.rewards, -bound, bound))
    return replace(scores, rewards=np.clip(scores.rewards, -bound, bound), baselines=baselines, turns=turns)


def to_tokens(rewards: np.ndarray, scores: Scores, gamma: float = 1.0) -> Doubles:
    """Return the discounted sum [T] of `token_rewards` from each token to the end of its response."""
    if scores.token_penalties is None:
        return discounted_end(rewards, scores.sequences, gamma)
    return discounted(token_rewards(rewards, scores), scores.sequences, gamma)


def token_rewards(rewards: np.ndarray, scores: Scores) -> Doubles:
    """Return rewards [T]: each response's reward [N] at its last token, less the penalties of every token; 0 outside the response mask."""
    sequences = scores.sequences
    mask = sequences.response_mask
    immediate = np.zeros(len(mask)) if scores.token_penalties is None else np.where(mask, -scores.token_penalties.astype(np.float64), 0.0)
    tokens = np.flatnonzero(mask)
    rows = np.repeat(np.arange(len(sequences)), sequences.lengths)[tokens]
    is_last = np.diff(rows, append=-1) != 0
    immediate[tokens[is_last]] += rewards[rows[is_last]]
    return immediate


def response_lengths(scores: Scores) -> np.ndarray:
    """Return the number of tokens of each response, [N]."""
    if scores.lengths is not None:
        return scores.lengths
    return np.add.reduceat(scores.sequences.response_mask, scores.sequences.offsets[:-1], dtype=np.int64)


def _centred(scores: Scores) -> Doubles:
    return standardise(scores.rewards, scores.groups, "group", None)
