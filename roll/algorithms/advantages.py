"""Computes advantages of response tokens from the rewards of a step. Pure functions of numpy arrays.

Every estimator maps `Scores` to advantages [T] and is registered in `ADVANTAGES` under its `adv_estimator` name. In the
formulas, r is the reward of a response, and means are taken over the responses to the same prompt. Unless an estimator
discounts rewards, every token of a response gets the same advantage, minus the sum of the penalties from that token to
the end of the response.

Computes how much each response contributes to the best of k rewards (pass@k if rewards are 0 or 1). Pure functions.

Sums over later rewards: discounted returns, generalised advantages, returns of turns.

Pure functions of ragged sequences, in float64. All sums are over the response tokens of one sequence and ignore tokens
outside the response mask.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import comb
from typing import Any, Literal

import numpy as np

from roll.algorithms.moments import EPSILON, Doubles, RunningMoments, Scope, by_group, standardise, whiten
from roll.registry import Registry
from roll.types import Floats, Ints, Sequences


@dataclass(frozen=True)
class EpisodeTurns:
    """The K turns of E episodes, ordered by episode."""

    rewards: Floats
    """[K], reward of each turn."""
    rows: Ints
    """[K], index of each turn's episode, non-decreasing."""
    of_token: Ints
    """[T], index of each token's turn. Tokens that are not sampled belong to the next turn, or else to the last."""
    states: Ints | None = None
    """[K], id of the environment's state before each turn. Equal ids mean equal states. None if states are unknown."""


def discounted(rewards: np.ndarray, sequences: Sequences, gamma: float) -> Doubles:
    """Return G [T], where G_t is the sum of gamma^(u - t) r_u over the response tokens u >= t of the sequence."""
    where, rows = _response_tokens(sequences)
    return _spread(_backward(rewards[where], rows, gamma), where, sequences)


def discounted_end(rewards: np.ndarray, sequences: Sequences, gamma: float) -> Doubles:
    """Return `discounted` [T] for rewards [N], each at its response's last token: gamma^(distance to it) * reward."""
    if gamma == 1:
        # Allocate only one large array: for ten million tokens, allocations cost more than the computation.
        out = np.repeat(rewards.astype(np.float64), sequences.lengths)
        out[~sequences.response_mask] = 0.0
        return out
    where, rows = _response_tokens(sequences)
    last = np.searchsorted(rows, rows, side="right") - 1
    earned = rewards[rows] * gamma ** (last - np.arange(len(rows)))
    return _spread(earned.astype(np.float64), where, sequences)


def gae(
    rewards: np.ndarray, values: np.ndarray, sequences: Sequences, gamma: float, lam: float
) -> tuple[Doubles, Doubles]:
    """Return generalised advantage estimates and the critic's targets, [T] each.

    delta_t = r_t + gamma V_(t+1) - V_t with V = 0 after the last response token;
    A_t = sum over u >= t of (gamma lam)^(u - t) delta_u; return_t = A_t + V_t.
    Source: Schulman et al., arXiv 1506.02438, eq. 11 and 16.

    Args:
        rewards: [T], reward of each token.
        values: [T], the critic's value before each token.
        lam: lambda. With 1, the advantage is the return minus the value; with 0, it is the one-step error.
    """
    where, rows = _response_tokens(sequences)
    now = values[where].astype(np.float64)
    follows = np.zeros(len(now))
    if len(now) > 1:
        follows[:-1] = np.where(rows[1:] == rows[:-1], now[1:], 0.0)
    advantages = _backward(rewards[where] + gamma * follows - now, rows, gamma * lam)
    return _spread(advantages, where, sequences), _spread(advantages + now, where, sequences)


def turn_returns(rewards: np.ndarray, rows: np.ndarray, gamma: float) -> Doubles:
    """Return G [K], where G_k is the sum of gamma^(j - k) R_j over the turns j >= k of a response. The discount is per
    turn, not per token.

    Args:
        rewards, rows: [K], see `Turns`.
    """
    return _backward(rewards.astype(np.float64), rows, gamma)


def undivided(sequences: Sequences, rewards: Floats) -> EpisodeTurns:
    """Return turns in which each response is a single turn."""
    rows = np.arange(len(sequences), dtype=np.int32)
    return EpisodeTurns(rewards, rows, np.repeat(rows, sequences.lengths))


def _response_tokens(sequences: Sequences) -> tuple[np.ndarray, np.ndarray]:
    """Return the positions of the response tokens, and the index of each token's sequence."""
    where = np.flatnonzero(sequences.response_mask)
    return where, np.repeat(np.arange(len(sequences)), sequences.lengths)[where]


def _backward(values: np.ndarray, rows: np.ndarray, decay: float) -> Doubles:
    """Return out [K] with out_i = values_i + decay * out_(i + 1) within each row. All rows are processed together, from
    their ends.

    Args:
        values: [K], ordered by row.
        rows: [K], row of each value, non-decreasing.
    """
    if not len(values):
        return np.zeros(0)
    rows = np.cumsum(np.diff(rows, prepend=rows[0]) != 0)
    counts = np.bincount(rows)
    longest, starts = int(counts.max()), np.cumsum(counts) - counts
    at = longest - counts[rows] + np.arange(len(rows)) - starts[rows]
    table = np.zeros((longest, len(counts)))
    table[at, rows] = values
    for step in range(longest - 2, -1, -1):
        table[step] += decay * table[step + 1]
    return table[at, rows]


def _spread(values: Doubles, where: np.ndarray, sequences: Sequences) -> Doubles:
    out = np.zeros(len(sequences.token_ids))
    out[where] = values
    return out


def added_to_best(rewards: Floats | Doubles, k: int) -> Doubles:
    """Return [n]: how much each response raises the largest reward of k - 1 other responses, averaged over all choices
    of the others.

    Rank the responses by reward from 1, lowest first. For the response of rank i, the best of the others has rank j < i
    in comb(j - 1, k - 2) of the comb(n - 1, k - 1) choices.

    Source: Walder and Karkhanis, arXiv 2505.15201, the estimator with the baseline of k - 1 samples (loo-1), without
    its factor of k / n.

    Args:
        rewards: [n], rewards of the responses to one prompt; n is at least 2.
        k: From 2 to n.
    """
    n = len(rewards)
    assert 2 <= k <= n, "k must be from 2 to the number of responses"
    order = np.argsort(rewards, kind="stable")
    ranked = rewards[order].astype(np.float64) - float(rewards.min())  # so that equal rewards give 0 exactly
    shares = np.array([comb(j, k - 2) / comb(n - 1, k - 1) for j in range(n - 1)])
    below, paid = np.cumsum(shares), np.cumsum(shares * ranked[:-1])
    out = np.zeros(n)
    out[order[1:]] = ranked[1:] * below - paid
    return out


@dataclass(frozen=True)
class Scores:
    """The rewards of one step's responses."""

    sequences: Sequences
    """N sequences, each a prompt and its response."""
    rewards: Floats
    """[N]"""
    groups: Ints
    """[N], index of each response's prompt."""
    token_penalties: Floats | None = None
    """[T], subtracted from the reward of each token (KL in the reward), or None."""
    lengths: Ints | None = None
    """[N], numbers of response tokens, also those outside the loss: weights of `opo`. None: count the response mask."""
    baselines: Floats | None = None
    """[N], reward of the greedy response to the same prompt. Required by `remax`."""
    running: RunningMoments | None = None
    """Moments of all rewards so far, including these. Required if a scope is `running`."""
    turns: EpisodeTurns | None = None
    """Rewards of the turns of each response, for `step_reinforce` and `gigpo`. None if every response is one turn."""
    values: Floats | None = None
    """[T], the critic's value before each token. Required by `gae`."""
    domains: Ints | None = None
    """[N], index of the domain of each response's prompt. Required if a scope is `domain`."""


@dataclass(frozen=True)
class Normalisation:
    """Settings of discounting, normalisation and clipping, around the estimator's own formula."""

    mean: Scope = None
    """Scope of the mean that is subtracted from rewards (`reinforce`) or from the returns of turns (`step_reinforce`).
    """
    std: Scope = None
    """Scope of the standard deviation by which the same values are divided."""
    gamma: float = 1.0
    """Discount of the rewards of later tokens (`reinforce`, `reinforce_plus_plus`, `remax`, `gae`) or later turns
    (`step_reinforce`).
    """
    lambd: float = 0.95
    """Lambda of `gae`: the decay of the temporal-difference errors of later tokens."""
    whiten: bool | Literal["domain"] = False
    """Whether to whiten advantages over the response tokens of the step, or over those of each domain."""
    reward_clip: float | None = None
    """Largest magnitude of a reward. None: no clipping."""
    clips_normalised: bool = False
    """Whether `reward_clip` bounds rewards after the normalisation, and again each token's reward after its penalty, as
    in ROLL. Otherwise it bounds the rewards before the normalisation. Only `grpo`, `reinforce` and `gae` have both.
    """
    advantage_clip: float | None = None
    """Largest magnitude of an advantage. None: no clipping."""

    @property
    def late_clip(self) -> float | None:
        """Return the largest magnitude of normalised rewards and of token rewards; None if they are not clipped."""
        return self.reward_clip if self.clips_normalised else None


Estimator = Callable[..., Doubles]
"""Called as `estimator(scores: Scores, norm: Normalisation, **own)`, where `own` are the estimator's own arguments."""
ADVANTAGES: Registry[Estimator] = Registry("advantage estimator")


@ADVANTAGES.register("grpo")
def grpo(scores: Scores, norm: Normalisation) -> Doubles:
    """Group relative policy optimisation: (r - mean) / (std + 1e-6), with the sample standard deviation (n - 1).

    If the standard deviation of a group is at most 1e-6, its advantages are r - mean; see `standardise`.

    Source: DeepSeekMath, arXiv 2402.03300, section 4.1.2.
    """
    return to_tokens(standardise(scores.rewards, scores.groups, "group", "group"), scores, bound=norm.late_clip)


@ADVANTAGES.register("dr_grpo")
def dr_grpo(scores: Scores, norm: Normalisation) -> Doubles:
    """GRPO done right: r - mean. Without the division, very easy and very hard questions weigh no more than the others.

    Source: Liu et al., arXiv 2503.20783, section 3.2. The paper aggregates losses as `seq-mean-token-sum-norm` does.
    """
    return to_tokens(_centred(scores), scores)


@ADVANTAGES.register("rloo")
def rloo(scores: Scores, norm: Normalisation) -> Doubles:
    """REINFORCE leave-one-out: r minus the mean of the group's other rewards, which is (r - mean) n / (n - 1). 0 in a
    group of one.

    Source: Ahmadian et al., arXiv 2402.14740.
    """
    size = by_group(scores.rewards, scores.groups, len)
    return to_tokens(_centred(scores) * size / np.maximum(size - 1, 1), scores)


@ADVANTAGES.register("reinforce")
def reinforce(scores: Scores, norm: Normalisation) -> Doubles:
    """REINFORCE: the discounted sum of rewards from each token on (Williams, 1992), if wanted of normalised ones."""
    rewards = standardise(scores.rewards, scores.groups, norm.mean, norm.std, scores.running, scores.domains)
    return to_tokens(rewards, scores, norm.gamma, norm.late_clip)


@ADVANTAGES.register("step_reinforce")
def step_reinforce(scores: Scores, norm: Normalisation) -> Doubles:
    """REINFORCE with rewards for turns: each token gets the return of its turn. The returns may be normalised over
    turns first.

    Equivalent to ROLL's estimator of this name. Penalties are summed over each turn and discounted like the turn's
    reward.
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
    """Group-in-group policy optimisation: compare each episode with its group, and each turn with turns taken in the
    same state.

    A = w_E (r - mean) / F + w_S (G_k - mean) / F. The first mean is over the rewards of the group. The second mean is
    over the returns G_k of all turns of the group that started in the same state. For a turn with a unique state, the
    second term is 0.

    Source: Feng et al., arXiv 2505.10978, eq. 3 to 8.

    Args:
        episode_reward_weight: w_E.
        step_reward_weight: w_S.
        step_reward_gamma: Discount of later turns' rewards in G_k.
        gigpo_std: If true, F is the standard deviation of the compared values, as in `grpo`. Otherwise F is 1.
    """
    turns, std = scores.turns or undivided(scores.sequences, scores.rewards), "group" if gigpo_std else None
    by_episode = to_tokens(episode_reward_weight * standardise(scores.rewards, scores.groups, "group", std), scores)
    returns = turn_returns(turns.rewards, turns.rows, step_reward_gamma)
    by_turn = step_reward_weight * standardise(returns, _anchors(turns, scores.groups), "group", std)
    return by_episode + np.where(scores.sequences.response_mask, by_turn[turns.of_token], 0.0)


def _anchors(turns: EpisodeTurns, groups: Ints) -> Ints:
    """Return an integer for each of the K turns. Turns of a group that started in the same state have equal ones."""
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
    """ReMax: the discounted sum of rewards from each token on, minus the reward of the greedy response to the same
    prompt.

    Source: Li et al., arXiv 2310.10505.
    """
    assert scores.baselines is not None, "remax needs the rewards of greedy responses"
    returns = to_tokens(scores.rewards, scores, norm.gamma)
    baselines = np.repeat(scores.baselines.astype(np.float64), scores.sequences.lengths)
    return np.where(scores.sequences.response_mask, returns - baselines, 0.0)


@ADVANTAGES.register("opo")
def opo(scores: Scores, norm: Normalisation) -> Doubles:
    """On-policy RL with the optimal baseline: r minus the group's length-weighted mean reward, sum(l r) / sum(l).

    This baseline minimises variance if the norm of a response's gradient grows with the square root of its length l in
    tokens. Source: Hao et al., arXiv 2505.23585.
    """
    lengths = response_lengths(scores).astype(np.float64)
    paid = by_group(lengths * scores.rewards, scores.groups, np.sum)
    baseline = paid / np.maximum(by_group(lengths, scores.groups, np.sum), 1)
    return to_tokens(scores.rewards - baseline, scores)


@ADVANTAGES.register("gpg")
def gpg(scores: Scores, norm: Normalisation) -> Doubles:
    """Group policy gradient: alpha (r - mean) with alpha = N / (N - M).

    M of the N responses belong to groups in which all rewards are equal, so they have no gradient. alpha turns the mean
    over all N responses into the mean over the other N - M.

    Source: Chu et al., arXiv 2504.02546.
    """
    differ = by_group(scores.rewards, scores.groups, np.ptp) > 0
    return to_tokens(_centred(scores) * len(differ) / max(int(differ.sum()), 1), scores)


@ADVANTAGES.register("maxrl")
def maxrl(scores: Scores, norm: Normalisation) -> Doubles:
    """Maximum likelihood RL: (r - mean) / mean. 0 in a group without success, that is, with a mean of at most 1e-6.

    With rewards of 0 and 1, a success rate p and n responses, its expected gradient is the gradient of the first n - 1
    terms of log p = -sum_k (1 - p)^k / k. The other estimators maximise only the first term. Source: Tajwar et al.,
    arXiv 2602.02710.
    """
    mean = by_group(scores.rewards, scores.groups, np.mean)
    return to_tokens(np.where(mean > EPSILON, _centred(scores) / np.maximum(mean, EPSILON), 0.0), scores)


@ADVANTAGES.register("pass_at_k")
def pass_at_k(scores: Scores, norm: Normalisation, pass_k: int = 4) -> Doubles:
    """Pass@k policy optimisation: k times the mean gain of the best reward when the response joins k - 1 others of its
    group.

    The mean is over all choices of the others. With these advantages, REINFORCE estimates the gradient of the expected
    best of k rewards without bias; for rewards of 0 and 1 this is pass@k. A correct response gets more if fewer others
    are correct, and a wrong response gets 0. In a group of fewer than k responses, k is the size of the group.

    Source: Walder and Karkhanis, arXiv 2505.15201 (loo-1). The values are n times the paper's, because the loss
    averages over n responses.
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
    """Generalised advantage estimation: sums of the critic's temporal-difference errors, weighted by (gamma
    lambda)^distance.

    The value after a response's last token is 0, whether the response ended or was truncated.
    Sources: Schulman et al., arXiv 1506.02438, eq. 16; PPO, arXiv 1707.06347, section 5.
    """
    return _gae(scores, norm)[0]


def advantages(estimator: str, scores: Scores, norm: Normalisation, own: Mapping[str, Any] | None = None) -> Floats:
    """Return advantages [T] by the named estimator, whitened and then clipped as `norm` specifies; 0 outside the
    response mask.

    Args:
        estimator: A name in `ADVANTAGES`, or `package.module:Name`.
        own: The estimator's own arguments.
    """
    return exact_advantages(estimator, scores, norm, own).astype(np.float32)


def exact_advantages(
    estimator: str, scores: Scores, norm: Normalisation, own: Mapping[str, Any] | None = None
) -> Doubles:
    """Return the same as `advantages`, in float64."""
    result = ADVANTAGES.find(estimator)(clipped(scores, norm), norm, **(own or {}))
    if norm.whiten:
        result = whiten(
            result, scores.sequences.response_mask, _token_domains(scores) if norm.whiten == "domain" else None
        )
    return result if norm.advantage_clip is None else np.clip(result, -norm.advantage_clip, norm.advantage_clip)


def _token_domains(scores: Scores) -> Ints:
    assert scores.domains is not None, (
        "advantages are whitened by domain, but the domain of each response was not given"
    )
    return np.repeat(scores.domains, scores.sequences.lengths)


def value_targets(scores: Scores, norm: Normalisation) -> Floats:
    """Return the critic's targets [T] for `gae`: values plus raw advantages; 0 outside the response mask."""
    return _gae(clipped(scores, norm), norm)[1].astype(np.float32)


def _gae(scores: Scores, norm: Normalisation) -> tuple[Doubles, Doubles]:
    assert scores.values is not None, "gae needs the values of a critic"
    return gae(
        token_rewards(scores.rewards, scores, norm.late_clip), scores.values, scores.sequences, norm.gamma, norm.lambd
    )


def clipped(scores: Scores, norm: Normalisation) -> Scores:
    """Return the scores with the rewards of responses, baselines and turns clipped to [-reward_clip, reward_clip].

    They are not changed if the rewards are clipped after the normalisation.
    """
    if norm.reward_clip is None or norm.clips_normalised:
        return scores
    bound = norm.reward_clip
    baselines = None if scores.baselines is None else np.clip(scores.baselines, -bound, bound)
    turns = scores.turns and replace(scores.turns, rewards=np.clip(scores.turns.rewards, -bound, bound))
    return replace(scores, rewards=np.clip(scores.rewards, -bound, bound), baselines=baselines, turns=turns)


def to_tokens(rewards: np.ndarray, scores: Scores, gamma: float = 1.0, bound: float | None = None) -> Doubles:
    """Return [T]: for each token, the discounted sum of `token_rewards` from the token to the end of its response."""
    if scores.token_penalties is None:
        return discounted_end(rewards if bound is None else np.clip(rewards, -bound, bound), scores.sequences, gamma)
    return discounted(token_rewards(rewards, scores, bound), scores.sequences, gamma)


def token_rewards(rewards: np.ndarray, scores: Scores, bound: float | None = None) -> Doubles:
    """Return rewards [T]: each response's reward [N] at its last token, minus each token's penalty; 0 outside the
    response mask.

    Args:
        bound: Largest magnitude of a response's reward before the penalties, and of each token's reward after them.
            None: no clipping.
    """
    if bound is not None:
        return np.clip(token_rewards(np.clip(rewards, -bound, bound), scores), -bound, bound)
    sequences = scores.sequences
    mask = sequences.response_mask
    immediate = (
        np.zeros(len(mask))
        if scores.token_penalties is None
        else np.where(mask, -scores.token_penalties.astype(np.float64), 0.0)
    )
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
