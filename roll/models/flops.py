"""Model FLOPs of training. Divided by time and a GPU's peak, they are the model FLOPs utilisation (MFU)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from roll.config.derived.flops import training_flops


@dataclass(frozen=True)
class TrainingFlops:
    """Model FLOPs of forward and backward passes over packed sequences.

    For each token, a parameter costs two FLOPs in the forward pass and two for the gradient of its input. A trained
    parameter costs two more for its own gradient. If all N parameters are trained, this is 6 N (Kaplan et al. 2020,
    arXiv:2001.08361, section 2.1). Attention is added as in Chowdhery et al. 2022, arXiv:2204.02311, appendix B, but
    halved because it is causal. Recomputed activations do not count, because model FLOPs exclude them.
    """

    parameters: int
    """Number of all parameters, including those of an adapter."""
    trained: int
    attending: float = 0.0
    """FLOPs of one token's attention to one other token in a forward pass. 0 leaves attention out."""

    def of(self, lengths: ArrayLike) -> float:
        """Return the FLOPs of one forward and backward pass over sequences of the given lengths, [N] in tokens."""
        tokens = np.asarray(lengths, np.float64)
        return training_flops(
            self.parameters, self.trained, self.attending, float(tokens.sum()), float((tokens**2).sum())
        )
