"""The loss of a reward model: the preferred response should score higher. Pure tensor functions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from roll.algorithms.losses import Loss, LossInputs, TokenLosses


@dataclass(frozen=True)
class BradleyTerry(Loss):
    """-log s(r(c) - r(r) - m) for each pair of scores r of a chosen and a rejected response, with the pair's margin m.

    Sources: Ouyang et al., arXiv 2203.02155, eq. 1; with the margin Llama 2, arXiv 2307.09288, eq. 2. Both scores of
    a pair carry its loss, so that the mean over sequences is the mean over pairs.
    """

    def __call__(self, scores: Tensor, inputs: LossInputs) -> TokenLosses:
        """See `Loss`. The model outputs one score [S = N] for each sequence, the chosen response's first."""
        if not len(scores):  # the filler, which is no pair
            return TokenLosses(scores, {})
        chosen, rejected = scores[0::2], scores[1::2]
        assert inputs.labels is not None, "pairs without their margins"
        losses = -logsigmoid(chosen - rejected - inputs.labels[0::2])
        up, down, all_count = chosen.detach(), rejected.detach(), torch.ones_like(chosen, dtype=torch.bool)
        metrics = {
            "reward_model/loss": losses.detach(),
            "reward_model/accuracy": (up > down).to(up.dtype),
            "reward_model/margin": up - down,
            "reward_model/chosen_score": up,
            "reward_model/rejected_score": down,
        }
        return TokenLosses(losses.repeat_interleave(2), {}, {name: (values, all_count) for name, values in metrics.items()})
