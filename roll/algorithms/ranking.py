"""The loss of a reward model, which learns to score the preferred response higher. Pure tensor functions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from roll.algorithms.losses import Loss, LossInputs, TokenLosses


@dataclass(frozen=True)
class BradleyTerry(Loss):
    """Bradley-Terry loss: -log s(c - r - m) for the scores c and r of a pair's chosen and rejected response, with the
    pair's margin m.

    s is the logistic function. Sources: Ouyang et al., arXiv 2203.02155, eq. 1; with the margin: Llama 2, arXiv
    2307.09288, eq. 2. The loss of a pair is assigned to both of its sequences, so the mean over sequences is the mean
    over pairs.
    """

    def __call__(self, scores: Tensor, inputs: LossInputs) -> TokenLosses:
        """See `Loss`. The model outputs one score per sequence, [S = N]; the chosen response of a pair comes before the
        rejected one.
        """
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
