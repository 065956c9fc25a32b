"""Preference losses on pairs of responses to one prompt, and on single responses with a label. Pure tensor functions.

In all formulas, y is a response, c and r are the chosen and the rejected response of a pair, l(y) = log pi(y|x) is
summed over tokens, |y| is the number of tokens, m(y) = l(y) / |y|, `ref` marks the same quantity under the reference
policy, and s is the logistic function. Every token of a pair has the loss of the pair, so the mean over tokens and then
sequences (`seq-mean-token-mean`) is the mean over pairs.

The loss of a reward model, which learns to score the preferred response higher. Pure tensor functions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from roll.algorithms.losses import Loss, LossInputs, TokenLosses
from roll.algorithms.ratios import sums
from roll.registry import Registry


@dataclass(frozen=True)
class BradleyTerry(Loss):
    """Bradley-Terry loss: -log s(c - r - m) for the scores c and r of a pair's chosen and rejected response, with the
    pair's margin m.

    s is the logistic function. Sources: Ouyang et al., arXiv 2203.02155, eq. 1; with the margin: Llama 2, arXiv
    2307.09288, eq. 2. The loss of a pair is assigned to both of its sequences, so the mean over sequences is the mean
    over pairs.
    """

    def __call__(self, scores: Tensor, inputs: LossInputs) -> TokenLosses:
        """See `Loss`. The model gives a score per sequence, [S = N]; a pair's chosen response comes first."""
        if not len(scores):  # a filler micro-batch without sequences
            return TokenLosses(scores, {})
        chosen, rejected = scores[0::2], scores[1::2]
        assert inputs.labels is not None, "the margins of the pairs are missing"
        losses = -logsigmoid(chosen - rejected - inputs.labels[0::2])
        up, down, all_count = chosen.detach(), rejected.detach(), torch.ones_like(chosen, dtype=torch.bool)
        metrics = {
            "reward_model/loss": losses.detach(),
            "reward_model/accuracy": (up > down).to(up.dtype),
            "reward_model/margin": up - down,
            "reward_model/chosen_score": up,
            "reward_model/rejected_score": down,
        }
        return TokenLosses(
            losses.repeat_interleave(2), {}, {name: (values, all_count) for name, values in metrics.items()}
        )


NEAREST = 1e-6
"""Mean log-probs are clamped to at most -NEAREST, because the odds of a response of probability 1 are infinite."""


@dataclass(frozen=True)
class Responses:
    """The chosen or rejected response of P pairs, [P] each, in fp64: margins are small differences of large sums."""

    log_probs: Tensor
    """l, with a gradient."""
    ref_log_probs: Tensor | None
    """l under the reference policy. None without a reference."""
    lengths: Tensor
    """|y|"""

    @property
    def mean(self) -> Tensor:
        """Return m."""
        return self.log_probs / self.lengths

    @property
    def log_ratio(self) -> Tensor:
        """Return l - ref l."""
        assert self.ref_log_probs is not None, "the loss needs the log-probs of the reference policy"
        return self.log_probs - self.ref_log_probs


@dataclass(frozen=True)
class PairLosses:
    """An objective's result for each pair, [P] each."""

    losses: Tensor
    """Losses, with a gradient."""
    chosen_rewards: Tensor
    """Implicit rewards of the chosen responses."""
    rejected_rewards: Tensor
    """Implicit rewards of the rejected responses."""


class PairObjective(Protocol):
    """A loss on preference pairs. Implementations are frozen and picklable."""

    def __call__(self, chosen: Responses, rejected: Responses) -> PairLosses:
        """Return the losses of the pairs."""
        ...


PAIR_OBJECTIVES: Registry[Callable[..., PairObjective]] = Registry("loss of pairs")
"""Constructors of losses on pairs by name. `PREFERENCE_LOSSES` maps configuration keys to their arguments."""
LABELLED_LOSSES: Registry[Callable[..., Loss]] = Registry("loss of labelled responses")
"""Constructors of losses on labelled responses by name, with arguments as for `PAIR_OBJECTIVES`."""


@PAIR_OBJECTIVES.register("dpo")
@dataclass(frozen=True)
class Dpo(PairObjective):
    """DPO: -(1 - e) log s(h) - e log s(-h) with h = beta (l(c) - ref l(c) - l(r) + ref l(r)) and the label smoothing e.

    Sources: DPO, arXiv 2305.18290, eq. 7. With e > 0 it is cDPO (Mitchell, 2023, "A note on DPO with noisy
    preferences", eq. 3).
    """

    beta: float = 0.1
    label_smoothing: float = 0.0

    def __call__(self, chosen: Responses, rejected: Responses) -> PairLosses:
        up, down = self.beta * chosen.log_ratio, self.beta * rejected.log_ratio
        losses = -(1 - self.label_smoothing) * logsigmoid(up - down) - self.label_smoothing * logsigmoid(down - up)
        return PairLosses(losses, up, down)


@PAIR_OBJECTIVES.register("ipo")
@dataclass(frozen=True)
class Ipo(PairObjective):
    """IPO: (m(c) - ref m(c) - m(r) + ref m(r) - 1 / (2 beta))^2.

    Source: arXiv 2310.12036, eq. 17. Log-probs are averaged over a response's tokens, as in the authors' code and in
    TRL.
    """

    beta: float = 0.1

    def __call__(self, chosen: Responses, rejected: Responses) -> PairLosses:
        up, down = chosen.log_ratio / chosen.lengths, rejected.log_ratio / rejected.lengths
        return PairLosses((up - down - 1 / (2 * self.beta)) ** 2, self.beta * up, self.beta * down)


@PAIR_OBJECTIVES.register("dpo_norm")
@dataclass(frozen=True)
class DpoNorm(PairObjective):
    """Length-normalised DPO: the loss of `Dpo` with h = beta (m(c) - ref m(c) - m(r) + ref m(r)), with means in place
    of sums.

    Source: Tulu 3, arXiv 2411.15124, with a beta of 5.
    """

    beta: float = 5.0
    label_smoothing: float = 0.0

    def __call__(self, chosen: Responses, rejected: Responses) -> PairLosses:
        up, down = self.beta * chosen.log_ratio / chosen.lengths, self.beta * rejected.log_ratio / rejected.lengths
        losses = -(1 - self.label_smoothing) * logsigmoid(up - down) - self.label_smoothing * logsigmoid(down - up)
        return PairLosses(losses, up, down)


@PAIR_OBJECTIVES.register("simpo")
@dataclass(frozen=True)
class SimPo(PairObjective):
    """SimPO: -log s(beta m(c) - beta m(r) - gamma). Needs no reference. Source: SimPO, arXiv 2405.14734, eq. 6."""

    beta: float = 2.0
    gamma: float = 0.5

    def __call__(self, chosen: Responses, rejected: Responses) -> PairLosses:
        up, down = self.beta * chosen.mean, self.beta * rejected.mean
        return PairLosses(-logsigmoid(up - down - self.gamma), up, down)


@PAIR_OBJECTIVES.register("orpo")
@dataclass(frozen=True)
class OrPo(PairObjective):
    """ORPO: -m(c) - beta log s(log odds(c) - log odds(r)) with odds(y) = p / (1 - p) and p = exp(m(y)). Needs no
    reference.

    Source: ORPO, arXiv 2403.07691, eq. 6 and 7. beta is the paper's lambda.
    """

    beta: float = 0.1

    def __call__(self, chosen: Responses, rejected: Responses) -> PairLosses:
        difference = _log_odds(chosen.mean) - _log_odds(rejected.mean)
        losses = -chosen.mean - self.beta * logsigmoid(difference)
        return PairLosses(losses, self.beta * chosen.mean, self.beta * rejected.mean)


@PAIR_OBJECTIVES.register("sft")
@dataclass(frozen=True)
class ChosenLikelihood(PairObjective):
    """Supervised fine-tuning on the chosen responses: -m(c). Needs no reference. With `Dpo`: RPO, arXiv 2404.19733."""

    def __call__(self, chosen: Responses, rejected: Responses) -> PairLosses:
        return PairLosses(-chosen.mean, chosen.mean, rejected.mean)


@dataclass(frozen=True)
class Mixture(PairObjective):
    """A weighted sum of losses: first + sum w * other. Implicit rewards are the first's. As MPO, arXiv 2411.10442."""

    first: PairObjective
    others: tuple[tuple[float, PairObjective], ...]
    """The other losses, each with its weight w."""

    def __call__(self, chosen: Responses, rejected: Responses) -> PairLosses:
        result = self.first(chosen, rejected)
        losses = result.losses
        for weight, objective in self.others:
            losses = losses + weight * objective(chosen, rejected).losses
        return replace(result, losses=losses)


def _log_odds(log_p: Tensor) -> Tensor:
    below_one = log_p.clamp(max=-NEAREST)
    return below_one - torch.log(-torch.expm1(below_one))


@dataclass(frozen=True)
class PreferenceLoss(Loss):
    """Applies a loss on pairs and gives it to each of their tokens. Sequences 2i and 2i + 1 are chosen and rejected."""

    objective: PairObjective

    def __call__(self, log_probs: Tensor, entropy: Tensor, inputs: LossInputs) -> TokenLosses:
        if not len(log_probs):  # a filler micro-batch without sequences
            return TokenLosses(log_probs, {})
        chosen, rejected = (_responses(log_probs, inputs, number) for number in (0, 1))
        result = self.objective(chosen, rejected)
        dtype = log_probs.dtype
        per_token = (
            result.losses.to(dtype).repeat_interleave(2).repeat_interleave(inputs.lengths, output_size=len(log_probs))
        )
        all_count = torch.ones_like(result.losses, dtype=torch.bool)
        up, down = result.chosen_rewards.detach(), result.rejected_rewards.detach()
        metrics = {
            "dpo/loss": result.losses.detach(),
            "dpo/accuracy": (up > down).to(up.dtype),
            "dpo/reward_margin": up - down,
            "dpo/chosen_reward": up,
            "dpo/rejected_reward": down,
            "dpo/chosen_log_prob": chosen.mean.detach(),
            "dpo/rejected_log_prob": rejected.mean.detach(),
        }
        return TokenLosses(per_token, {}, {name: (values.to(dtype), all_count) for name, values in metrics.items()})


def _responses(log_probs: Tensor, inputs: LossInputs, number: int) -> Responses:
    """Return the chosen (number 0) or the rejected (number 1) response of every pair."""
    ref = inputs.ref_log_probs
    ref_sums = None if ref is None else sums(ref, inputs.lengths)[number::2]
    return Responses(sums(log_probs, inputs.lengths)[number::2], ref_sums, inputs.lengths[number::2])


@LABELLED_LOSSES.register("kto")
@dataclass(frozen=True)
class Kto(Loss):
    """KTO: w (1 - s(z - k)) for desirable and w (1 - s(k - z)) for undesirable responses, with z = beta (l(y) - ref
    l(y)).

    k is beta times `kl`, an estimate of KL(policy || reference) that has no gradient. It is computed before the update
    from mismatched prompts and responses, and is at least 0. Source: KTO, arXiv 2402.01306, eq. 8, and section 4.1 for
    the estimate.
    """

    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    kl: float = 0.0
    """KL estimate in nats per response, without beta."""

    def __call__(self, log_probs: Tensor, entropy: Tensor, inputs: LossInputs) -> TokenLosses:
        if not len(log_probs):  # a filler micro-batch without sequences
            return TokenLosses(log_probs, {})
        assert inputs.ref_log_probs is not None and inputs.labels is not None, (
            "KTO needs reference log-probs and labels"
        )
        log_ratio = sums(log_probs.double() - inputs.ref_log_probs.double(), inputs.lengths).to(log_probs.dtype)
        desirable = inputs.labels > 0.5
        sign = torch.where(desirable, 1.0, -1.0).to(log_ratio.dtype)
        weight = torch.where(desirable, self.desirable_weight, self.undesirable_weight).to(log_ratio.dtype)
        losses = weight * (1 - torch.sigmoid(sign * self.beta * (log_ratio - self.kl)))
        all_count, rewards = torch.ones_like(desirable), self.beta * log_ratio.detach()
        counted = {
            "dpo/loss": (losses.detach(), all_count),
            "dpo/chosen_reward": (rewards, desirable),
            "dpo/rejected_reward": (rewards, ~desirable),
            "dpo/kl": (torch.full_like(rewards, self.kl), all_count),
        }
        return TokenLosses(losses.repeat_interleave(inputs.lengths, output_size=len(log_probs)), {}, counted)
