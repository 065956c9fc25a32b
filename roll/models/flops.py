"""Model FLOPs of training and peak FLOP/s of GPUs. Their ratio is the model FLOPs utilisation (MFU)."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

DENSE_BF16_PEAKS: tuple[tuple[frozenset[str], float], ...] = (
    (frozenset({"B200"}), 2.25e15),
    (frozenset({"H200", "NVL"}), 835e12),
    (frozenset({"H200"}), 989e12),
    (frozenset({"GH200"}), 989e12),
    (frozenset({"H100", "NVL"}), 835e12),
    (frozenset({"H100", "PCIe"}), 756e12),
    (frozenset({"H100"}), 989e12),
    (frozenset({"A100"}), 312e12),
    (frozenset({"A800"}), 312e12),
    (frozenset({"L40S"}), 362e12),
    (frozenset({"L4"}), 121e12),
)
"""Words in a GPU's name, and its dense bf16 FLOP/s from NVIDIA's data sheet. More specific names come first."""


def dense_bf16_peak(device_name: str) -> float | None:
    """Return the peak FLOP/s of a GPU by its CUDA name. None for unknown GPUs and MIG slices."""
    words = set(re.findall(r"\w+", device_name))
    return next((peak for known, peak in DENSE_BF16_PEAKS if known <= words and "MIG" not in words), None)


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
        products = (4 * self.parameters + 2 * self.trained) * tokens.sum()
        # A causal mask leaves half of the pairs. The backward pass costs twice the forward pass, because both operands
        # have a gradient.
        return float(products + 3 * self.attending * (tokens**2).sum() / 2)
