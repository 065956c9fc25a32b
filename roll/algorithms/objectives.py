"""The policy terms of a loss, one class for each method: token losses from log-probs and advantages. Pure tensor functions.

In all formulas d = log pi - log old is the log-ratio of the current policy to the one that ratios are taken against, r = exp(d),
A the token's advantage, sg(.) stops the gradient, and mean_y and sum_y run over the response tokens of the token's sequence.
Where a logarithm is above 20 its exponential is that of 20; see `ratio_of`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from roll.algorithms.binary import binary_divergence
from roll.algorithms.covariance import largest, some_between, token_covariances
from roll.algorithms.ratios import ratio_of
from roll.algorithms.segments import sequence_mean, sequence_sum
from roll.registry import Registry
from roll.types import Bools, TrainBatch


@dataclass(frozen=True)
class PolicyTokens:
    """An objective's inputs for S response tokens of N sequences. Only `log_probs` has a gradient."""

    log_probs: Tensor
    """[S], log-probs of the current policy."""
    old_log_probs: Tensor
    """[S], log-probs of the policy in the denominator of ratios."""
    advantages: Tensor
    """[S]"""
    lengths: Tensor
    """int64 [N]"""
    token_selection: Tensor | None = None
    """bool [S]"""

    @property
    def log_ratio(self) -> Tensor:
        """[S]"""
        return self.log_probs - self.old_log_probs


@dataclass(frozen=True)
class Surrogate:
    """An objective's result for each token, [S] each."""

    losses: Tensor
    """Losses with a gradient."""
    ratio: Tensor
    """The ratio that the loss used: of the token, or of its sequence."""
    clipped: Tensor
    """bool, tokens without a gradient because of a clip or a selection."""


class Objective(Protocol):
    """A policy term. Implementations are frozen and picklable."""

    def __call__(self, tokens: PolicyTokens) -> Surrogate:
        """Losses of the tokens."""
        ...

    def token_selection(self, batch: TrainBatch) -> Bools | None:
        """Select [T] tokens that the objective treats differently, over a whole step. None without a selection."""
        return None


OBJECTIVES: Registry[Callable[..., Objective]] = Registry("policy loss")
"""By name, the function that builds the objective from the arguments that `POLICY_LOSSES` reads from the keys."""


@OBJECTIVES.register("ppo")
@dataclass(frozen=True)
class Ppo(Objective):
    """Proximal policy optimisation: max(-A r, -A clip(r, 1 - low, 1 + high)).

    Sources: PPO, arXiv 1707.06347, eq. 7; separate bounds: DAPO, arXiv 2503.14476, eq. 10; dual clip, which bounds
    the loss of tokens with A < 0 at -A dual_clip: Ye et al., arXiv 1912.09729.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None

    def __call__(self, tokens: PolicyTokens) -> Surrogate:
        """See `Objective`."""
        surrogate = _clipped(ratio_of(tokens.log_ratio), tokens.advantages, self.clip_low, self.clip_high)
        if self.dual_clip is None:
            return surrogate
        bound = torch.where(tokens.advantages < 0, -tokens.advantages * self.dual_clip, torch.inf)
        return Surrogate(torch.minimum(surrogate.losses, bound), surrogate.ratio, surrogate.clipped | (surrogate.losses > bound))


@OBJECTIVES.register("pg")
@dataclass(frozen=True)
class PolicyGradient(Objective):
    """REINFORCE: -A log pi. No ratio and no clip. Source: R. J. Williams, 1992."""

    def __call__(self, tokens: PolicyTokens) -> Surrogate:
        """See `Objective`."""
        ratio = ratio_of(tokens.log_ratio.detach())
        return Surrogate(-tokens.advantages * tokens.log_probs, ratio, torch.zeros_like(ratio, dtype=torch.bool))


@OBJECTIVES.register("gspo")
@dataclass(frozen=True)
class Gspo(Objective):
    """Group sequence policy optimisation by token: PPO's clip of sg(s) pi / sg(pi) with the sequence's ratio s = exp(mean_y d).

    Its value is s at each token. A token's own log-prob carries the gradient, so that each token is paid its own advantage; with
    advantages that are equal throughout a sequence the gradient is that of s. Source: GSPO-token, arXiv 2507.18071, section 4.3
    (eq. 5 and 7 for s). With `seq-mean-token-mean` the aggregate is the paper's.
    """

    clip_low: float = 3e-4
    clip_high: float = 4e-4

    def __call__(self, tokens: PolicyTokens) -> Surrogate:
        """See `Objective`."""
        ratio = ratio_of(sequence_mean(tokens.log_ratio.detach(), tokens.lengths))
        own = (tokens.log_probs - tokens.log_probs.detach()).exp()  # 1, with the gradient of log pi
        return _clipped(ratio * own, tokens.advantages, self.clip_low, self.clip_high)


@OBJECTIVES.register("gmpo")
@dataclass(frozen=True)
class Gmpo(Objective):
    """Geometric-mean policy optimisation: -A exp(mean_y c), where c is d clipped, token by token, on PPO's side of it.

    c = sign(A) min(sign(A) d, sign(A) clip(d, -low, high)): the bounds are of the log-ratio. Source: Zhao et al.,
    arXiv 2507.20673, with (exp(-0.4), exp(0.4)). With `seq-mean-token-mean` the aggregate is the paper's.
    """

    clip_low: float = 0.4
    clip_high: float = 0.4

    def __call__(self, tokens: PolicyTokens) -> Surrogate:
        """See `Objective`."""
        d, sign = tokens.log_ratio, tokens.advantages.sign()
        bounded = d.clamp(-self.clip_low, self.clip_high)
        clipped = sign * bounded < sign * d
        ratio = ratio_of(sequence_mean(torch.where(clipped, bounded, d), tokens.lengths))
        return Surrogate(-tokens.advantages * ratio, ratio.detach(), clipped.detach())


@OBJECTIVES.register("cispo")
@dataclass(frozen=True)
class Cispo(Objective):
    """Clipped importance-sampling policy optimisation: -sg(clip(r, 1 - low, 1 + high)) A log pi.

    The weight is clipped and not the loss, so no token's gradient is cut off. Source: MiniMax-M1, arXiv 2506.13585;
    the paper has no lower bound, which is `clip_low` 1.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2

    def __call__(self, tokens: PolicyTokens) -> Surrogate:
        """See `Objective`."""
        ratio = ratio_of(tokens.log_ratio.detach())
        weight = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        return Surrogate(-weight * tokens.advantages * tokens.log_probs, ratio, weight != ratio)


@OBJECTIVES.register("sapo")
@dataclass(frozen=True)
class Sapo(Objective):
    """Soft adaptive policy optimisation: -A (4 / tau) s(tau (r - 1)), with s the logistic function in place of a clip.

    A token's gradient falls smoothly as r leaves 1, where it is that of -A r. tau is `positive` for A > 0, otherwise `negative`.
    Source: Gao et al., arXiv 2511.20347; its temperatures are 1 and 1.05.
    """

    positive: float = 1.0
    negative: float = 1.05

    def __call__(self, tokens: PolicyTokens) -> Surrogate:
        """See `Objective`."""
        ratio = ratio_of(tokens.log_ratio)
        tau = torch.full_like(ratio, self.negative).masked_fill(tokens.advantages > 0, self.positive)
        losses = -tokens.advantages * 4 / tau * torch.sigmoid(tau * (ratio - 1))
        return Surrogate(losses, ratio.detach(), torch.zeros_like(ratio, dtype=torch.bool))


@OBJECTIVES.register("dppo")
@dataclass(frozen=True)
class Dppo(Objective):
    """Divergence proximal policy optimisation: -A r, without the tokens whose policy has moved too far in the direction of A.

    A token is left out where r is above 1 and A > 0, or below 1 and A < 0, and the divergence of pi from old is above `threshold`. It
    is that of two distributions over two outcomes, the sampled token and any other: `tv` is |pi - old|, `kl` is KL(old || pi).
    Source: Qi et al., arXiv 2602.04879, with its binary approximation of divergences; the thresholds are the authors'.
    """

    divergence: Literal["tv", "kl"] = "tv"
    threshold: float = 0.15

    def __call__(self, tokens: PolicyTokens) -> Surrogate:
        """See `Objective`."""
        ratio = ratio_of(tokens.log_ratio)
        apart = binary_divergence(tokens.log_probs.detach(), tokens.old_log_probs, self.divergence)
        moves_along = tokens.log_ratio.detach() * tokens.advantages > 0
        masked = moves_along & (apart > self.threshold)
        return Surrogate(torch.where(masked, 0.0, -tokens.advantages * ratio), ratio.detach(), masked)


@OBJECTIVES.register("topr")
@dataclass(frozen=True)
class Topr(Objective):
    """Tapered off-policy REINFORCE: -w A log pi, with w fixed for A >= 0 and tapered by the sequence's ratio for A < 0.

    w = positive where A >= 0, else negative sg(min(1, exp(sum_y d))): good responses are learnt as they are, bad ones only
    as far as the policy still gives them. Source: Le Roux et al., arXiv 2503.14286.
    """

    positive: float = 1.0
    negative: float = 1.0

    def __call__(self, tokens: PolicyTokens) -> Surrogate:
        """See `Objective`."""
        total = sequence_sum(tokens.log_ratio.detach(), tokens.lengths)
        tapered, falls = total.clamp(max=0.0).exp(), tokens.advantages < 0
        weight = torch.where(falls, self.negative * tapered, self.positive)
        return Surrogate(-weight * tokens.advantages * tokens.log_probs, tapered, falls & (total > 0))


@OBJECTIVES.register("clip_cov")
@dataclass(frozen=True)
class ClipCov(Objective):
    """PPO without the gradient of some tokens whose log-prob and advantage vary together most: those end exploration.

    The covariance of a token is (log old - mean)(A - mean), the means over the step's response tokens. Of those between
    `low` and `high`, a share `ratio` of all tokens is drawn and has loss 0. Source: Cui et al., arXiv 2505.22617. It is drawn
    over the step from `old`, so that a split into updates, ranks and micro-batches changes nothing; the paper draws in each
    mini-batch from the current policy, which is the same in a step's first update.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    ratio: float = 2e-4
    low: float = 1.0
    high: float = 5.0

    def token_selection(self, batch: TrainBatch) -> Bools | None:
        """See `Objective`."""
        return some_between(token_covariances(batch), batch, self.ratio, self.low, self.high)

    def __call__(self, tokens: PolicyTokens) -> Surrogate:
        """See `Objective`."""
        assert tokens.token_selection is not None, "no tokens were chosen"
        surrogate = _clipped(ratio_of(tokens.log_ratio), tokens.advantages, self.clip_low, self.clip_high)
        losses = torch.where(tokens.token_selection, 0.0, surrogate.losses)
        return Surrogate(losses, surrogate.ratio, surrogate.clipped | tokens.token_selection)


@OBJECTIVES.register("kl_cov")
@dataclass(frozen=True)
class KlCov(Objective):
    """-A r, and |d| times `coef` more for the share `ratio` of tokens with the largest covariance (see `ClipCov`).

    Source: Cui et al., arXiv 2505.22617, with the authors' |d| for the KL, which has no gradient at d = 0: the penalty acts
    from a step's second update on.
    """

    ratio: float = 2e-4
    coef: float = 1.0

    def token_selection(self, batch: TrainBatch) -> Bools | None:
        """See `Objective`."""
        return largest(token_covariances(batch), batch, self.ratio)

    def __call__(self, tokens: PolicyTokens) -> Surrogate:
        """See `Objective`."""
        assert tokens.token_selection is not None, "no tokens were chosen"
        ratio = ratio_of(tokens.log_ratio)
        penalty = torch.where(tokens.token_selection, self.coef * tokens.log_ratio.abs(), 0.0)
        return Surrogate(penalty - tokens.advantages * ratio, ratio.detach(), tokens.token_selection)


def _clipped(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Surrogate:
    free, bounded = -advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high)
    return Surrogate(torch.maximum(free, bounded), ratio.detach(), (bounded > free).detach())
