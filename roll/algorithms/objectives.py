"""The policy terms of the loss, one class per method: token losses from log-probs and advantages. Pure tensor
functions.

In all formulas, d = log pi - log old is the log-ratio of the current policy to the old policy, r = exp(d), A is the
token's advantage, sg(.) stops the gradient, and mean_y and sum_y are over the response tokens of the token's sequence.
Log-ratios are clamped to at most 20 before exponentiation; see `ratio_of`.

`PolicyLoss` adds to such a term a correction for the engine's log-probs, KL and entropy. `clip_cov` and `kl_cov` choose
their tokens in numpy on the whole step, before it is split (Cui et al., "The Entropy Mechanism of Reinforcement
Learning for Reasoning Language Models", arXiv 2505.22617).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from roll.algorithms.corrections import MismatchCorrection
from roll.algorithms.kl import EXPONENTIAL, importance_weighted, token_kl
from roll.algorithms.losses import Loss, LossInputs, TokenLosses
from roll.algorithms.ratios import is_clamped, ratio_of, sequence_mean, sequence_sum
from roll.registry import Registry
from roll.types import Bools, TrainBatch


def token_covariances(batch: TrainBatch) -> np.ndarray:
    """Return float64 [T], (log old - mean)(A - mean), with means over the response tokens; undefined elsewhere."""
    old = batch.behaviour_log_probs if batch.proximal_log_probs is None else batch.proximal_log_probs
    assert old is not None, "covariances need log-probs from before the update"
    mask = batch.sequences.response_mask
    log_probs, advantages = old.astype(np.float64), batch.advantages.astype(np.float64)
    if not mask.any():
        return np.zeros(len(mask))
    return (log_probs - log_probs[mask].mean()) * (advantages - advantages[mask].mean())


def largest(covariances: np.ndarray, batch: TrainBatch, ratio: float) -> Bools:
    """Mark [T] the response tokens with the largest covariances: a fraction `ratio`, at least one, first ones first."""
    where = np.flatnonzero(batch.sequences.response_mask)
    order = np.argsort(-covariances[where], kind="stable")
    return _chosen(where[order[: _count(len(where), ratio)]], len(covariances))


def any_between(covariances: np.ndarray, batch: TrainBatch, ratio: float, low: float, high: float) -> Bools:
    """Mark [T] random response tokens with a covariance in (low, high).

    Their number is a fraction `ratio` of all response tokens, at least one, or all tokens in the interval if there are
    fewer. The token ids of the step seed the draw, so a resumed run draws the same tokens.
    """
    sequences = batch.sequences
    where = np.flatnonzero(sequences.response_mask & (covariances > low) & (covariances < high))
    count = min(_count(int(sequences.response_mask.sum()), ratio), len(where))
    random = np.random.default_rng(zlib.crc32(sequences.token_ids.tobytes()))
    return _chosen(random.choice(where, count, replace=False), len(covariances))


def _count(tokens: int, ratio: float) -> int:
    return min(max(int(ratio * tokens), 1), tokens)


def _chosen(where: np.ndarray, tokens: int) -> Bools:
    out = np.zeros(tokens, np.bool_)
    out[where] = True
    return out


def binary_divergence(log_probs: Tensor, old_log_probs: Tensor, kind: Literal["tv", "kl"]) -> Tensor:
    """Return the binary divergence [S] of the sampled tokens' probabilities p and q: `tv` is |p - q|, `kl` is KL(q ||
    p) in nats.

    It is a lower bound of the divergence of the whole distributions. If log p or log q rounds to 0, its complement is
    below the precision of a probability near 1, half the machine epsilon, and this precision takes its place.

    Source: Qi et al., arXiv 2602.04879.

    Args:
        log_probs: [S], log p.
        old_log_probs: [S], log q.
    """
    log_p, log_q = log_probs.clamp(max=0.0), old_log_probs.clamp(max=0.0)
    q = log_q.exp()
    if kind == "tv":
        return (log_p.exp() - q).abs()
    return (q * (log_q - log_p) - torch.expm1(log_q) * (_log_rest(log_q) - _log_rest(log_p))).clamp(min=0.0)


def _log_rest(log_p: Tensor) -> Tensor:
    """Return log(1 - p), exact for any log p below 0."""
    rest = -torch.expm1(log_p)
    return torch.where(rest > 0, rest, torch.finfo(log_p.dtype).eps / 2).log()


@dataclass(frozen=True)
class PolicyTokens:
    """An objective's inputs for S response tokens of N sequences. Only `log_probs` has a gradient."""

    log_probs: Tensor
    """[S], log-probs of the current policy."""
    old_log_probs: Tensor
    """[S], log-probs of the old policy, the denominator of ratios."""
    advantages: Tensor
    """[S]"""
    lengths: Tensor
    """int64 [N], number of response tokens of each sequence."""
    token_selection: Tensor | None = None
    """bool [S], tokens selected by `Objective.token_selection`. None without a selection."""

    @property
    def log_ratio(self) -> Tensor:
        """Return d [S]."""
        return self.log_probs - self.old_log_probs


@dataclass(frozen=True)
class Surrogate:
    """An objective's result for each token, [S] each."""

    losses: Tensor
    """Losses, with a gradient."""
    ratio: Tensor
    """Ratio of the token or of its sequence, whichever the loss uses."""
    clipped: Tensor
    """bool, tokens that the objective clips, caps, masks or penalises, for the metric `policy/clip_fraction`."""


class Objective(Protocol):
    """A policy term. Implementations are frozen and picklable."""

    def __call__(self, tokens: PolicyTokens) -> Surrogate:
        """Return the losses of the tokens."""
        ...

    def token_selection(self, batch: TrainBatch) -> Bools | None:
        """Return a mask [T] of the tokens that the objective treats differently, chosen over the step, or None."""
        return None


OBJECTIVES: Registry[Callable[..., Objective]] = Registry("policy loss")
"""Constructors of objectives by name. `POLICY_LOSSES` maps configuration keys to their arguments."""


@OBJECTIVES.register("ppo")
@dataclass(frozen=True)
class Ppo(Objective):
    """Proximal policy optimisation: max(-A r, -A clip(r, 1 - low, 1 + high)).

    With `dual_clip`, the loss of a token with A < 0 is at most -A dual_clip.

    Sources: PPO, arXiv 1707.06347, eq. 7; separate bounds: DAPO, arXiv 2503.14476, eq. 10; dual clip: Ye et al., arXiv
    1912.09729.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None

    def __call__(self, tokens: PolicyTokens) -> Surrogate:
        surrogate = _clipped(ratio_of(tokens.log_ratio), tokens.advantages, self.clip_low, self.clip_high)
        if self.dual_clip is None:
            return surrogate
        bound = torch.where(tokens.advantages < 0, -tokens.advantages * self.dual_clip, torch.inf)
        return Surrogate(
            torch.minimum(surrogate.losses, bound), surrogate.ratio, surrogate.clipped | (surrogate.losses > bound)
        )


@OBJECTIVES.register("pg")
@dataclass(frozen=True)
class PolicyGradient(Objective):
    """REINFORCE: -A log pi. No ratio and no clip. Source: R. J. Williams, 1992."""

    def __call__(self, tokens: PolicyTokens) -> Surrogate:
        ratio = ratio_of(tokens.log_ratio.detach())
        return Surrogate(-tokens.advantages * tokens.log_probs, ratio, torch.zeros_like(ratio, dtype=torch.bool))


@OBJECTIVES.register("gspo")
@dataclass(frozen=True)
class Gspo(Objective):
    """Group sequence policy optimisation: PPO's clip with the ratio sg(s) pi / sg(pi), where s = exp(mean_y d) is the
    sequence ratio.

    The ratio has the value s at each token, and its gradient flows through the token's own log-prob, so each token is
    weighted by its own advantage. If all advantages of a sequence are equal, the gradient equals that of s. Source:
    GSPO-token, arXiv 2507.18071, section 4.3 (eq. 5 and 7 for s). With `seq-mean-token-mean`, the aggregated loss is
    the paper's.
    """

    clip_low: float = 3e-4
    clip_high: float = 4e-4

    def __call__(self, tokens: PolicyTokens) -> Surrogate:
        ratio = ratio_of(sequence_mean(tokens.log_ratio.detach(), tokens.lengths))
        own = (tokens.log_probs - tokens.log_probs.detach()).exp()  # has the value 1 and the gradient of log pi
        return _clipped(ratio * own, tokens.advantages, self.clip_low, self.clip_high)


@OBJECTIVES.register("gmpo")
@dataclass(frozen=True)
class Gmpo(Objective):
    """Geometric-mean policy optimisation: -A exp(mean_y c), where c is d clipped for each token in the direction that
    PPO clips.

    c = sign(A) min(sign(A) d, sign(A) clip(d, -low, high)), so the bounds apply to the log-ratio. Source: Zhao et al.,
    arXiv 2507.20673, with the bounds (exp(-0.4), exp(0.4)). With `seq-mean-token-mean`, the aggregated loss is the
    paper's.
    """

    clip_low: float = 0.4
    clip_high: float = 0.4

    def __call__(self, tokens: PolicyTokens) -> Surrogate:
        d, sign = tokens.log_ratio, tokens.advantages.sign()
        bounded = d.clamp(-self.clip_low, self.clip_high)
        clipped = sign * bounded < sign * d
        ratio = ratio_of(sequence_mean(torch.where(clipped, bounded, d), tokens.lengths))
        return Surrogate(-tokens.advantages * ratio, ratio.detach(), clipped.detach())


@OBJECTIVES.register("cispo")
@dataclass(frozen=True)
class Cispo(Objective):
    """Clipped importance-sampling policy optimisation: -sg(clip(r, 1 - low, 1 + high)) A log pi.

    The weight is clipped instead of the loss, so every token keeps a gradient. Source: MiniMax-M1, arXiv 2506.13585.
    The paper has no lower bound, which corresponds to `clip_low=1`.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2

    def __call__(self, tokens: PolicyTokens) -> Surrogate:
        ratio = ratio_of(tokens.log_ratio.detach())
        weight = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        return Surrogate(-weight * tokens.advantages * tokens.log_probs, ratio, weight != ratio)


@OBJECTIVES.register("sapo")
@dataclass(frozen=True)
class Sapo(Objective):
    """Soft adaptive policy optimisation: -A (4 / tau) s(tau (r - 1)), where s is the logistic function. It replaces the
    clip.

    At r = 1 the gradient is that of -A r, and it decays smoothly as r moves away from 1. tau is `positive` for A > 0,
    otherwise `negative`. Source: Gao et al., arXiv 2511.20347, with temperatures of 1 and 1.05.
    """

    positive: float = 1.0
    negative: float = 1.05

    def __call__(self, tokens: PolicyTokens) -> Surrogate:
        ratio = ratio_of(tokens.log_ratio)
        tau = torch.full_like(ratio, self.negative).masked_fill(tokens.advantages > 0, self.positive)
        losses = -tokens.advantages * 4 / tau * torch.sigmoid(tau * (ratio - 1))
        return Surrogate(losses, ratio.detach(), torch.zeros_like(ratio, dtype=torch.bool))


@OBJECTIVES.register("dppo")
@dataclass(frozen=True)
class Dppo(Objective):
    """Divergence proximal policy optimisation: -A r, without tokens at which the policy has moved too far in the
    direction of A.

    A token is left out if the divergence between pi and old is above `threshold`, and either r > 1 and A > 0, or r < 1
    and A < 0. The divergence is over two outcomes, the sampled token and any other token: `tv` is |pi - old|, `kl` is
    KL(old || pi). Source: Qi et al., arXiv 2602.04879, with the paper's binary approximation of divergences and its
    thresholds.
    """

    divergence: Literal["tv", "kl"] = "tv"
    threshold: float = 0.15

    def __call__(self, tokens: PolicyTokens) -> Surrogate:
        ratio = ratio_of(tokens.log_ratio)
        apart = binary_divergence(tokens.log_probs.detach(), tokens.old_log_probs, self.divergence)
        moves_along = tokens.log_ratio.detach() * tokens.advantages > 0
        masked = moves_along & (apart > self.threshold)
        return Surrogate(torch.where(masked, 0.0, -tokens.advantages * ratio), ratio.detach(), masked)


@OBJECTIVES.register("topr")
@dataclass(frozen=True)
class Topr(Objective):
    """Tapered off-policy REINFORCE: -w A log pi, where w is constant for A >= 0 and tapered by the sequence ratio for A
    < 0.

    w = positive if A >= 0, and negative * sg(min(1, exp(sum_y d))) otherwise. Good responses always have full weight,
    and bad responses lose weight as they become less likely under the policy. Source: Le Roux et al., arXiv 2503.14286.
    """

    positive: float = 1.0
    negative: float = 1.0

    def __call__(self, tokens: PolicyTokens) -> Surrogate:
        total = sequence_sum(tokens.log_ratio.detach(), tokens.lengths)
        tapered, falls = total.clamp(max=0.0).exp(), tokens.advantages < 0
        weight = torch.where(falls, self.negative * tapered, self.positive)
        return Surrogate(-weight * tokens.advantages * tokens.log_probs, tapered, falls & (total > 0))


@OBJECTIVES.register("clip_cov")
@dataclass(frozen=True)
class ClipCov(Objective):
    """PPO with a loss of 0 for a few random tokens of high covariance, because learning from these tokens reduces
    entropy most.

    The covariance of a token is (log old - mean)(A - mean), with means over the response tokens of the step. Among
    tokens with a covariance between `low` and `high`, random tokens are drawn; their number is a fraction `ratio` of
    all response tokens. Source: Cui et al., arXiv 2505.22617. The draw covers the whole step and uses `old`, so it does
    not depend on the split into updates, ranks and micro-batches. The paper draws in each mini-batch with the current
    policy, which equals `old` in a step's first update.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    ratio: float = 2e-4
    low: float = 1.0
    high: float = 5.0

    def token_selection(self, batch: TrainBatch) -> Bools | None:
        return any_between(token_covariances(batch), batch, self.ratio, self.low, self.high)

    def __call__(self, tokens: PolicyTokens) -> Surrogate:
        assert tokens.token_selection is not None, "the token selection is missing"
        surrogate = _clipped(ratio_of(tokens.log_ratio), tokens.advantages, self.clip_low, self.clip_high)
        losses = torch.where(tokens.token_selection, 0.0, surrogate.losses)
        return Surrogate(losses, surrogate.ratio, surrogate.clipped | tokens.token_selection)


@OBJECTIVES.register("kl_cov")
@dataclass(frozen=True)
class KlCov(Objective):
    """-A r, plus coef * |d| for the tokens with the largest covariance, a fraction `ratio` of all response tokens (see
    `ClipCov`).

    Source: Cui et al., arXiv 2505.22617, with |d| as the authors' estimate of the KL. |d| has no gradient at d = 0, so
    the penalty has no effect before the second update of a step.
    """

    ratio: float = 2e-4
    coef: float = 1.0

    def token_selection(self, batch: TrainBatch) -> Bools | None:
        return largest(token_covariances(batch), batch, self.ratio)

    def __call__(self, tokens: PolicyTokens) -> Surrogate:
        assert tokens.token_selection is not None, "the token selection is missing"
        ratio = ratio_of(tokens.log_ratio)
        penalty = torch.where(tokens.token_selection, self.coef * tokens.log_ratio.abs(), 0.0)
        return Surrogate(penalty - tokens.advantages * ratio, ratio.detach(), tokens.token_selection)


def _clipped(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Surrogate:
    free, bounded = -advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high)
    return Surrogate(torch.maximum(free, bounded), ratio.detach(), (bounded > free).detach())


@dataclass(frozen=True)
class PolicyLoss(Loss):
    """loss = weight * objective + kl_coef * KL(policy || reference) - entropy_coef * entropy.

    With `on_policy`, the old policy in the objective's ratios is the current policy. Without it, the old policy is the
    trainer's policy before the step's first update, or the behaviour policy if the log-probs of the former are not
    given. The weight comes from the correction, and is 1 without one; see `Correction`. `kl_importance` and
    `mask_threshold` compare the policy with the behaviour policy if its log-probs are given, otherwise with the old
    policy. With `mask_threshold`, the objective's term is 0 at the tokens that `is_far_and_bad` marks.
    """

    objective: Objective = field(default_factory=Ppo)
    correction: MismatchCorrection | None = None
    on_policy: bool = False
    """Whether the current policy is used as the old one, as a step makes only one update. Ratios are then exactly 1."""
    kl_coef: float = 0.0
    kl_estimator: str = "k3"
    kl_importance: bool = False
    """Whether to weight the KL of each token by the ratio of the policy to the policy that sampled the token."""
    entropy_coef: float = 0.0
    mask_threshold: float | None = None
    """Threshold of `is_far_and_bad`, in nats per token. None: no token is masked."""

    def token_selection(self, batch: TrainBatch) -> Bools | None:
        return self.objective.token_selection(batch)

    def __call__(self, log_probs: Tensor, entropy: Tensor, inputs: LossInputs) -> TokenLosses:
        old = self._old(log_probs, inputs)
        surrogate = self.objective(
            PolicyTokens(log_probs, old, inputs.advantages, inputs.lengths, inputs.token_selection)
        )
        losses = surrogate.losses
        metrics = {
            "policy/loss": losses.detach(),
            "policy/ratio": surrogate.ratio,
            "policy/clip_fraction": surrogate.clipped.float(),
            "policy/kl_behaviour": token_kl(
                old, log_probs, "k3"
            ).detach(),  # KL(old || policy); k3 is unbiased over samples of `old`
            "policy/entropy": entropy.detach(),
        }
        clamped = is_clamped(log_probs - old)
        if self.correction is not None:
            assert inputs.behaviour_log_probs is not None, "a correction needs the engine's log-probs"
            corrected = self.correction(old - inputs.behaviour_log_probs, inputs.lengths)
            losses = losses * corrected.weights
            metrics |= corrected.metrics
        sampled = old if inputs.behaviour_log_probs is None else inputs.behaviour_log_probs
        if self.mask_threshold is not None:
            masked = is_far_and_bad(log_probs - sampled, inputs.advantages, inputs.lengths, self.mask_threshold)
            losses = torch.where(masked, 0.0, losses)
            metrics["policy/off_policy_masked_fraction"] = masked.float()
        if inputs.ref_log_probs is not None:
            kl = token_kl(log_probs, inputs.ref_log_probs, self.kl_estimator)
            metrics["policy/kl_ref"] = kl.detach()
            if self.kl_estimator in EXPONENTIAL:
                clamped = clamped | is_clamped(inputs.ref_log_probs - log_probs)
            if self.kl_coef and self.kl_importance:
                clamped = clamped | is_clamped(log_probs - sampled)
                kl = importance_weighted(kl, log_probs - sampled, self.kl_estimator)
            if self.kl_coef:
                losses = losses + self.kl_coef * kl
        if self.entropy_coef:
            losses = losses - self.entropy_coef * entropy
        metrics["policy/clamped_fraction"] = clamped.float()
        return TokenLosses(losses, metrics)

    def _old(self, log_probs: Tensor, inputs: LossInputs) -> Tensor:
        if self.on_policy:
            return log_probs.detach()
        old = inputs.behaviour_log_probs if inputs.proximal_log_probs is None else inputs.proximal_log_probs
        assert old is not None, "ratios need the log-probs of an old policy"
        return old


def is_far_and_bad(log_ratio: Tensor, advantages: Tensor, lengths: Tensor, threshold: float) -> Tensor:
    """Return a mask, bool [S], of the tokens with A < 0 in sequences in which the mean of log(mu / pi) is above
    `threshold`.

    Source: off-policy sequence masking, DeepSeek-V3.2, arXiv 2512.02556, section 3.1.

    Args:
        log_ratio: [S], log(pi / mu), where mu is the policy that sampled.
        advantages: [S], A.
        lengths: int64 [N], number of response tokens of each sequence.
        threshold: In nats per token.
    """
    return (advantages < 0) & (sequence_mean(-log_ratio.detach(), lengths) > threshold)
